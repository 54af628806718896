"""The walk: every model class behind transformers' auto-mappings, and autopipe's own hand-written zoo.

Small configs are left to ``configs``, inputs to ``inputs``.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
from typing import Any

__all__ = ["HEADS", "TASKS", "Entry", "by_hash", "entries"]

TASKS = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "masked": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "image": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "audio": "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES",
    "ctc": "MODEL_FOR_CTC_MAPPING_NAMES",
    "speech": "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "vision-text": "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "zero-shot": "MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "sequence": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "token": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
    "question": "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES",
}
"""The auto-mapping behind each task."""

HEADS = ("sequence", "token", "question")
"""Tasks that put one more head on bodies that mostly appear under another task already."""


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """One model of the walk: ``task/model_type/ClassName``, or ``own/name`` for the hand-written zoo."""

    task: str
    model_type: str
    class_name: str

    @property
    def name(self) -> str:
        return "/".join(part for part in (self.task, self.model_type, self.class_name) if part)


def entries() -> tuple[Entry, ...]:
    """Every model of the walk once, under the first task that has it."""
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    seen: set[str] = set()
    out: list[Entry] = []
    for task, mapping in TASKS.items():
        for model_type, value in getattr(auto, mapping).items():
            for class_name in value if isinstance(value, (tuple, list)) else (value,):
                if class_name not in seen:
                    seen.add(class_name)
                    out.append(Entry(task, model_type, class_name))
    own = importlib.import_module("tests.zoo.registry").CASES
    return (*(Entry("own", name, "") for name, case in own.items() if not case.refused), *out)


def by_hash(entry: Entry) -> str:
    """The key of an order in which any first few models are a fair sample."""
    return hashlib.sha256(entry.name.encode()).hexdigest()


def own_case(name: str) -> Any:
    """(model, inputs) of a hand-written model; ``inputs(batch, length)`` gives args and kwargs."""
    case = importlib.import_module("tests.zoo.registry").CASES[name]
    return case.build(), case.inputs


def config_of(entry: Entry) -> Any:
    """The default config of the entry's model class."""
    import transformers

    cls = getattr(transformers, entry.class_name)
    config_class = cls.config_class or transformers.CONFIG_MAPPING[entry.model_type]
    return config_class()
