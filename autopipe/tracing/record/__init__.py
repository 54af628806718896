"""One run of a model, recorded: what goes whole into it, what call by call."""
