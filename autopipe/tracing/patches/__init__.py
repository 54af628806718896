"""What is patched in torch and Python while a model is being recorded, and put back afterwards.

``patches`` puts all of them on; ``route`` says where a patched call goes.

- Patched: ``queries`` (questions whose answers may change), ``memos`` (``lru_cache``), ``seeding``
  (``torch.manual_seed``), ``transforms`` (functions that take functions).
- Not patched: ``importing`` (modules imported meanwhile see torch as it is).
"""
