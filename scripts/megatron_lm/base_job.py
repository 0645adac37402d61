"""The arguments of the usual job of pretrain_gpt.py: a small GPT, TP 2 x PP 2, bf16, the distributed optimizer.

Rules of this file: standard library only.
"""

from __future__ import annotations

MODEL = """
    --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32
    --position-embedding-type rope --tokenizer-type NullTokenizer --vocab-size 257 --transformer-impl local
    --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-dropout-fusion
    --no-persist-layer-norm --no-rope-fusion --use-cpu-initialization --distributed-backend gloo
"""
TRAINING = """
    --micro-batch-size 1 --global-batch-size 8 --lr 1e-3 --min-lr 1e-5 --lr-decay-style cosine --lr-warmup-iters 1
    --log-interval 1 --num-workers 0 --split 98,2,0 --eval-iters 1 --eval-interval 7
"""
LAYOUT = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel"
OPTIMIZER = "--bf16 --use-distributed-optimizer"


def arguments(corpus: str, iterations: int, *more: str) -> list[str]:
    """The usual job, TP2 PP2 with sequence parallelism, bf16 and the distributed optimizer, and whatever is added."""
    words = f"{MODEL} {TRAINING} {LAYOUT} {OPTIMIZER} --train-iters {iterations}".split()
    data = ["--data-path", corpus, "--data-cache-path", f"{corpus}.indices"]
    return [*words, *data, *more]
