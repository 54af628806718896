"""Problems from op graphs, costs and clusters, and plans from their answers.

What a problem's answer costs is said by ``definition``.
"""
