"""Small models that do in their own forward what a graph can get wrong, each held against a twin."""
