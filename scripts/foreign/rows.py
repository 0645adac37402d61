"""Rows of strangers.py: whose script, with which arguments, what it needs.

Rules of this file: standard library and data only. `{folder}` in a word is the run's own folder. Sizes are those of a
test; options are what the script's own documentation has people pass, as far as a CPU allows it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from clusters import forked_node
from megatron_lm import base_job, jobs

STAGE = Path(__file__).resolve().with_name("stage.py")
PROJECTS = ("megatron-lm", "deepspeed-examples", "transformers", "accelerate", "trl")
IN_DEEPSPEED = ("forward", "backward", "before", "optimizer", "mirror", "between")
IN_MEGATRON = ("forward", "backward", "optimizer", "mirror", "between")
HUGGING_FACE = ("transformers", "accelerate", "datasets", "evaluate")


def _nothing(_: Path) -> dict[str, str]:
    return {}


@dataclass(frozen=True)
class Row:
    """Args:
    steps: updates the script makes.
    words, environment: of the folder with the material.
    packages: distributions that must be installed.
    local_rank: whether the script takes the deepspeed launcher's --local_rank.
    models: what it finds under names of the hub.
    resumes: the row whose checkpoint of step `begins` lies in `{resumed}` when the script begins; "" for none.
    unfit: why the packages that are installed are not the script's; "" if they are.
    """

    name: str
    project: str
    script: str
    words: Callable[[Path], list[str]]
    meant: str
    steps: int = 12
    must_hold: bool = False
    packages: tuple[str, ...] = ("deepspeed",)
    preload: tuple[str, ...] = forked_node.DEEPSPEED
    environment: Callable[[Path], dict[str, str]] = _nothing
    framework: str = "deepspeed"
    phases: tuple[str, ...] = IN_DEEPSPEED
    wrapper: Path = STAGE
    local_rank: bool = True
    models: tuple[str, ...] = ()
    resumes: str = ""
    begins: int = 0
    unfit: Callable[[], str] = field(default=lambda: "")

    def script_in(self, folder: Path) -> Path | None:
        """The script of that name in `folder`, or the first below it that ends with it."""
        if (folder / self.script).is_file():
            return folder / self.script
        found = sorted(path for path in folder.rglob(Path(self.script).name) if str(path).endswith(self.script))
        return found[0] if found else None


def _file(material: Path, name: str, content: dict[str, object]) -> str:
    """A configuration file beside the material."""
    path = material / name
    path.write_text(json.dumps(content))
    return str(path)


def _trainers(material: Path, stage: int) -> str:
    automatic = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    return _file(material, f"trainer{stage}.json", {**dict.fromkeys(automatic, "auto"), **_zero(stage)})


def _zero(stage: int) -> dict[str, object]:
    return {"zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True}


# DeepSpeedExamples


def _hello(material: Path) -> list[str]:
    sizes = "--num_layers 2 --num_heads 2 --ff_dim 64 --h_dim 32 --max_seq_length 32 --batch_size 2"
    return [*f"{sizes} --num_iterations 13 --checkpoint_every 5 --log_every 5".split(), "--checkpoint_dir", "{folder}"]


def _cifar(material: Path) -> list[str]:
    words = "--deepspeed --epochs 1 --dtype fp32 --stage 1 --log-interval 4"
    return words.split()


def _pipeline(material: Path) -> list[str]:
    adam = {"type": "Adam", "params": {"lr": 0.001, "betas": [0.9, 0.999], "eps": 1e-8}}
    config = {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 2, "optimizer": adam, "steps_per_print": 10}
    words = "-p 2 -s 12 --backend gloo --deepspeed --deepspeed_config"
    return [*words.split(), _file(material, "pipe.json", config)]


# Hugging Face


def _accelerate(material: Path) -> dict[str, str]:
    """Make the variables that `accelerate launch --use_deepspeed --deepspeed_config_file` sets."""
    config = {"train_micro_batch_size_per_gpu": 16, "gradient_accumulation_steps": 1, **_zero(2)}
    return {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_CONFIG_FILE": _file(material, "accelerate.json", config),
        "ACCELERATE_MIXED_PRECISION": "no",
    }


TRAINER = "--max_steps 12 --logging_steps 1 --report_to none --per_device_train_batch_size 2 --save_steps 4"


def _clm(material: Path, output: str = "{folder}/out") -> list[str]:
    size = "n_embd=32,n_layer=2,n_head=2,n_positions=64,vocab_size=64"
    words = f"--model_type gpt2 --config_overrides {size} --do_train --do_eval --block_size 32 {TRAINER}".split()
    files = ["--tokenizer_name", str(material / "qwen"), "--train_file", str(material / "text.txt")]
    return [*words, *files, "--output_dir", output, "--deepspeed", _trainers(material, 2)]


def _of_transformers_4() -> str:
    import dataclasses

    from transformers import TrainingArguments

    names = {one.name for one in dataclasses.fields(TrainingArguments)}
    return "" if "overwrite_output_dir" in names else "the script is of transformers 4: a later one is installed"


def _sft(material: Path) -> list[str]:
    words = f"--use_peft --lora_r 4 --lora_alpha 8 --learning_rate 2.0e-4 {TRAINER} --bf16 False".split()
    names = ["--model_name_or_path", str(material / "qwen"), "--dataset_name", str(material / "chats")]
    return [*names, *words, "--output_dir", "{folder}/out", "--deepspeed", _trainers(material, 2)]


# Megatron-LM


def _gpt(material: Path) -> list[str]:
    return base_job.arguments(str(material.parent / "corpus"), 12)


MASKED = """
    --hidden-size 64 --num-attention-heads 4 --max-position-embeddings 64 --legacy-tokenizer --vocab-extra-ids 100
    --tokenizer-type BertWordPieceLowerCase --transformer-impl local --no-gradient-accumulation-fusion
    --no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-dropout-fusion --no-persist-layer-norm
    --use-cpu-initialization --distributed-backend gloo --bf16 --use-distributed-optimizer
    --tensor-model-parallel-size 2 --train-iters 12
"""


def _masked(material: Path, more: str) -> list[str]:
    words = f"{MASKED} {base_job.TRAINING} {more}".split()
    data = ["--data-path", str(material / "sentences"), "--vocab-file", str(material / "vocab.txt")]
    return [*words, *data, "--data-cache-path", str(material / "sentences.indices")]


def _t5(material: Path) -> list[str]:
    return _masked(material, "--encoder-num-layers 2 --encoder-seq-length 64 --decoder-seq-length 32")


def _bert(material: Path) -> list[str]:
    layout = "--num-layers 2 --seq-length 64 --pipeline-model-parallel-size 2"
    return _masked(material, f"{layout} --spec local --short-seq-prob 0")  # short samples without a mask give NaN


def _mamba(material: Path) -> list[str]:
    spec = "--spec megatron.core.models.mamba.mamba_layer_specs mamba_stack_spec --hybrid-override-pattern M*"
    return [*_gpt(material), *spec.split()]


def _hybrid(material: Path) -> list[str]:
    layers = "--spec foreign.hybrid_layers stack --hybrid-layer-pattern *-|*-"
    words = _gpt(material)
    number = words.index("--num-layers")  # the pattern says it
    return [*words[:number], *words[number + 2 :], *layers.split()]


LOADED = (*forked_node.DEEPSPEED, "transformers.trainer", "datasets", "evaluate")
ROWS = {
    row.name: row
    for row in (
        Row("pretrain-gpt", "megatron-lm", "pretrain_gpt.py", _gpt,
            "Megatron-LM's pretrain_gpt.py (TP 2, PP 2, bf16, distributed optimizer)", must_hold=True,
            packages=("megatron-core",), framework="megatron", phases=IN_MEGATRON, wrapper=jobs.PRETRAIN),
        Row("pretrain-t5", "megatron-lm", "pretrain_t5.py", _t5,
            "Megatron-LM's pretrain_t5.py (TP 2, DP 2, bf16, distributed optimizer)", must_hold=True,
            packages=("megatron-core",), framework="megatron", phases=IN_MEGATRON, wrapper=jobs.PRETRAIN),
        Row("pretrain-bert", "megatron-lm", "pretrain_bert.py", _bert,
            "Megatron-LM's pretrain_bert.py (TP 2, PP 2, bf16, distributed optimizer)",
            packages=("megatron-core",), framework="megatron", phases=IN_MEGATRON, wrapper=jobs.PRETRAIN),
        Row("pretrain-mamba", "megatron-lm", "pretrain_mamba.py", _mamba,
            "Megatron-LM's pretrain_mamba.py (a Mamba and an attention layer, TP 2, PP 2)",
            packages=("megatron-core",), framework="megatron", phases=IN_MEGATRON, wrapper=jobs.PRETRAIN),
        Row("pretrain-hybrid", "megatron-lm", "pretrain_hybrid.py", _hybrid,
            "Megatron-LM's pretrain_hybrid.py (attention and MLP layers, TP 2, PP 2)",
            packages=("megatron-core",), framework="megatron", phases=IN_MEGATRON, wrapper=jobs.PRETRAIN),
        Row("hello-deepspeed", "deepspeed-examples", "HelloDeepSpeed/train_bert_ds.py", _hello,
            "DeepSpeedExamples HelloDeepSpeed (ZeRO 1, bf16, offloaded Adam, saves)", must_hold=True,
            packages=("deepspeed", "transformers", "datasets", "fire", "loguru", "pytz", "sh", "tensorboard"),
            preload=(*LOADED, "torch.utils.tensorboard", "fire", "loguru", "pytz", "sh"),
            models=("roberta-base's tokenizer (of a few words)",)),
        Row("cifar", "deepspeed-examples", "cifar/cifar10_deepspeed.py", _cifar,
            "DeepSpeedExamples cifar (ZeRO 1, a loss outside the model)"),
        Row("pipeline", "deepspeed-examples", "pipeline_parallelism/train.py", _pipeline,
            "DeepSpeedExamples pipeline_parallelism (two stages, two replicas)"),
        Row("run-clm", "transformers", "run_clm.py", _clm,
            "transformers' run_clm.py with its auto-resume (ZeRO 2, saves, evaluation)", must_hold=True,
            local_rank=False, packages=("deepspeed", *HUGGING_FACE), preload=LOADED, unfit=_of_transformers_4),
        Row("run-clm-resumed", "transformers", "run_clm.py", lambda material: _clm(material, "{resumed}"),
            "transformers' run_clm.py, which finds a checkpoint of step 4 in its folder and goes on from it",
            must_hold=True, local_rank=False, packages=("deepspeed", *HUGGING_FACE), preload=LOADED,
            unfit=_of_transformers_4, resumes="run-clm", begins=4),
        Row("nlp-example", "accelerate", "examples/nlp_example.py", lambda _: [],
            "accelerate's nlp_example.py with a DeepSpeed configuration (ZeRO 2)", must_hold=True,
            local_rank=False, packages=("deepspeed", *HUGGING_FACE), preload=LOADED, environment=_accelerate,
            models=("bert-base-cased (tiny, random)",)),
        Row("complete-nlp-example", "accelerate", "examples/complete_nlp_example.py",
            lambda _: ["--checkpointing_steps", "epoch", "--output_dir", "{folder}/out"],
            "accelerate's complete_nlp_example.py, a checkpoint an epoch (ZeRO 2)",
            local_rank=False, packages=("deepspeed", *HUGGING_FACE), preload=LOADED, environment=_accelerate,
            models=("bert-base-cased (tiny, random)",)),
        Row("sft", "trl", "trl/scripts/sft.py", _sft, "TRL's sft.py with LoRA (ZeRO 2)", must_hold=True,
            local_rank=False, packages=("deepspeed", "trl", "peft", *HUGGING_FACE), preload=(*LOADED, "trl", "peft")),
    )
}  # fmt: skip
