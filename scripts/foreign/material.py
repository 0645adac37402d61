"""Models, tokenizers, data sets and metrics for scripts that would download them: small, made here, always the same.

`make` writes what can be files: a hub's cache with tiny models under the names that the scripts ask for, and texts.
`stand_in` answers for what cannot: `datasets.load_dataset` and `evaluate.load` of data on the hub, and torchvision,
where it is not installed. Rules of this file: it knows nothing of the plugin; nothing is drawn but from fixed seeds.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import random
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

TEXT = "a node of the job dies and it goes on with one more from last step bit for equal numbers"
WORDS = TEXT.split()
SENTENCES, REVISION = 2048, "0" * 40
STAND_IN = "stand-in "
"""Before the name of what a rank found instead of what its script asked for, in its output."""


def sentences(seed: int, count: int) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randint(5, 12))) for _ in range(count)]


# Files


def make(folder: Path) -> None:
    """The files, if they are not there."""
    if not (folder / "made").exists():
        folder.mkdir(parents=True, exist_ok=True)
        lines = sentences(1, SENTENCES)
        (folder / "text.txt").write_text("\n".join(lines) + "\n")
        chats = folder / "chats"
        chats.mkdir(exist_ok=True)
        talk = [{"messages": [_said("user", a), _said("assistant", b)]} for a, b in zip(lines, lines[1:], strict=False)]
        (chats / "train.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in talk[:256]))
        _models(folder)
        (folder / "made").touch()


def environment(folder: Path) -> dict[str, str]:
    """Variables by which libraries find the files, and ask nobody else."""
    return {
        "HF_HOME": str(folder / "hf"),
        "HF_HUB_CACHE": str(folder / "hub"),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "JE_ARROW_MALLOC_CONF": "background_thread:false",  # everything is a fork
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
    }


def make_masked(folder: Path) -> None:
    """A vocabulary of word pieces and sentences of them, as Megatron-LM's preprocess_data.py would write them, if they
    are not there."""
    if (folder / "sentences.idx").exists():
        return
    import numpy
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *dict.fromkeys(WORDS), "##s", "##ed"]
    (folder / "vocab.txt").write_text("\n".join(pieces) + "\n")
    number = {piece: index for index, piece in enumerate(pieces)}
    builder = IndexedDatasetBuilder(str(folder / "sentences.bin"), dtype=numpy.uint16)
    lines = [[number[word] for word in line.split()] for line in sentences(8, SENTENCES)]
    for first in range(0, len(lines), 8):
        document = lines[first : first + 8]
        tokens = numpy.array([token for line in document for token in line], dtype=numpy.uint16)
        builder.add_document(tokens, [len(line) for line in document])
    builder.finalize(str(folder / "sentences.idx"))


def _said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _models(folder: Path) -> None:
    if importlib.util.find_spec("transformers") is None:
        return
    import transformers

    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    tokens = len(_vocabulary())
    torch.manual_seed(5)
    for name in ("bert-base-cased", "roberta-base"):
        at = folder / "hub" / f"models--{name}"
        (at / "refs").mkdir(parents=True, exist_ok=True)
        (at / "refs" / "main").write_text(REVISION)
        bert = transformers.BertConfig(vocab_size=tokens, max_position_embeddings=128, **size)
        transformers.BertForSequenceClassification(bert).save_pretrained(at / "snapshots" / REVISION)
        _tokenizer("bert").save_pretrained(at / "snapshots" / REVISION)
    qwen = transformers.Qwen2Config(
        vocab_size=tokens, max_position_embeddings=128, num_key_value_heads=2, tie_word_embeddings=False, **size
    )
    transformers.Qwen2ForCausalLM(qwen).save_pretrained(folder / "qwen")
    _tokenizer("qwen").save_pretrained(folder / "qwen")


SPECIAL = {
    "pad": "[PAD]",
    "unk": "[UNK]",
    "cls": "[CLS]",
    "sep": "[SEP]",
    "mask": "[MASK]",
    "bos": "<s>",
    "eos": "</s>",
}
TEMPLATE = "{% for message in messages %}{{ message['role'] }} : {{ message['content'] }} </s> {% endfor %}"


def _vocabulary() -> dict[str, int]:
    return {word: number for number, word in enumerate([*SPECIAL.values(), "user", "assistant", ":", *WORDS])}


def _tokenizer(kind: str) -> Any:
    import tokenizers
    import transformers

    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(_vocabulary(), unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    special = {f"{name}_token": token for name, token in SPECIAL.items()}
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=made, model_max_length=128, **special)
    if kind == "qwen":
        fast.chat_template = TEMPLATE
    return fast


# Answers


def _tell(what: str) -> None:
    print(f"{STAND_IN}{what}", flush=True)


def stand_in() -> None:
    """Prepare a rank's process, before its script begins."""
    if not torch.cuda.is_available():
        torch.cuda.set_device = lambda *_: None  # type: ignore[assignment] # of scripts that know GPUs only
    if importlib.util.find_spec("accelerate") and importlib.util.find_spec("transformers"):
        from patches.cpu import accelerate

        accelerate.apply()
    if importlib.util.find_spec("datasets"):
        import datasets

        datasets.load_dataset = _instead(datasets.load_dataset, {"wikitext": _wikitext, "nyu-mll/glue": _mrpc})
    if importlib.util.find_spec("evaluate"):
        import evaluate

        evaluate.load = _instead(evaluate.load, {"glue": Metric, "accuracy": Metric})
    if importlib.util.find_spec("torchvision") is None:
        _torchvision()


def _instead(original: Callable[..., Any], answers: dict[str, Callable[[], Any]]) -> Callable[..., Any]:
    def load(path: str, *args: Any, **kwargs: Any) -> Any:
        if path not in answers:
            return original(path, *args, **kwargs)
        _tell(f"{path} of {original.__module__.partition('.')[0]} (made here)")
        return answers[path]()

    return load


def _wikitext() -> Any:
    import datasets

    return datasets.Dataset.from_dict({"text": sentences(2, 512)})


def _mrpc() -> Any:
    import datasets

    def split(seed: int, count: int) -> Any:
        first, second = sentences(seed, count), sentences(seed + 1, count)
        labels = [len(a) % 2 for a in first]
        columns = {"sentence1": first, "sentence2": second, "label": labels, "idx": list(range(count))}
        return datasets.Dataset.from_dict(columns)

    return datasets.DatasetDict(train=split(3, 256), validation=split(5, 128))


class Metric:
    """The share of right answers, under the name that each script asks for."""

    def __init__(self) -> None:
        self._pairs: list[tuple[int, int]] = []

    def add_batch(self, predictions: Any, references: Any) -> None:
        self._pairs += zip(torch.as_tensor(predictions).tolist(), torch.as_tensor(references).tolist(), strict=True)

    def compute(self, predictions: Any = (), references: Any = ()) -> dict[str, float]:
        self.add_batch(predictions, references)
        pairs, self._pairs = self._pairs, []
        right = sum(a == b for a, b in pairs) / max(1, len(pairs))
        return {"accuracy": right, "f1": right}


# torchvision


class Cifar(torch.utils.data.Dataset[Any]):
    """Noise in CIFAR-10's shape: 192 pictures to train on, 40 to test."""

    def __init__(self, root: str, train: bool = True, download: bool = False, transform: Any = None) -> None:
        _tell("CIFAR-10 and transforms of torchvision (noise)")
        draw = torch.Generator().manual_seed(7 + train)
        self._pictures = torch.rand(192 if train else 40, 3, 32, 32, generator=draw)
        self._transform = transform

    def __len__(self) -> int:
        return len(self._pictures)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self._transform(self._pictures[index]), index % 10


class Compose:
    def __init__(self, parts: list[Callable[[torch.Tensor], torch.Tensor]]) -> None:
        self._parts = parts

    def __call__(self, picture: torch.Tensor) -> torch.Tensor:
        for part in self._parts:
            picture = part(picture)
        return picture


class Normalize:
    def __init__(self, mean: Any, std: Any) -> None:
        self._mean, self._std = (torch.tensor(one).view(-1, 1, 1) for one in (mean, std))

    def __call__(self, picture: torch.Tensor) -> torch.Tensor:
        return (picture - self._mean) / self._std


def _same(*_: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda picture: picture


class AlexNet(torch.nn.Module):
    """Its parts, in its order, for pictures of 32 by 32 and with few channels."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        _tell("AlexNet of torchvision (a small one)")
        conv, relu, linear = torch.nn.Conv2d, torch.nn.ReLU, torch.nn.Linear
        self.features = torch.nn.Sequential(
            conv(3, 8, 3, padding=1), relu(), torch.nn.MaxPool2d(2), conv(8, 16, 3, padding=1), relu(),
            torch.nn.MaxPool2d(2), conv(16, 16, 3, padding=1), relu(), conv(16, 8, 3, padding=1), relu(),
        )  # fmt: skip
        self.avgpool = torch.nn.AdaptiveAvgPool2d((6, 6))
        self.classifier = torch.nn.Sequential(
            torch.nn.Dropout(), linear(8 * 36, 64), relu(), torch.nn.Dropout(), linear(64, 64), relu(),
            linear(64, num_classes),
        )  # fmt: skip

    def forward(self, pictures: torch.Tensor) -> Any:
        return self.classifier(torch.flatten(self.avgpool(self.features(pictures)), 1))


def _torchvision() -> None:
    parts: dict[str, dict[str, Any]] = {
        "transforms": {
            "Compose": Compose, "Normalize": Normalize, "ToTensor": _same, "Resize": _same, "CenterCrop": _same,
        },
        "datasets": {"CIFAR10": Cifar},
        "models": {"AlexNet": AlexNet, "vgg19": None},
    }  # fmt: skip
    top = types.ModuleType("torchvision")
    for name, members in parts.items():
        module = types.ModuleType(f"torchvision.{name}")
        vars(module).update(members)
        setattr(top, name, module)
        sys.modules[module.__name__] = module
    for module in (top, *(sys.modules[f"torchvision.{name}"] for name in parts)):
        module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None)
    sys.modules["torchvision"] = top
