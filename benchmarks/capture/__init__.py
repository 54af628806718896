"""How much of the zoo autopipe captures and cuts, how exactly and how fast, beside torch.export.

Run it as ``python -m benchmarks.capture``. The walk over transformers is in ``zoo``, small configs in
``configs``, inputs in ``inputs``, what is checked in ``trial``, processes in ``workers``.
"""
