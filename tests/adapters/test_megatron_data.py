"""A newcomer reads Megatron-core's data sets as the rank did: passed over only where an item depends on its index."""

from types import SimpleNamespace

import numpy
import pytest
import torch
from torch.utils.data import DataLoader

from deadpool_plugin.adapters.megatron import adapter
from deadpool_plugin.worker import iterators
from deadpool_plugin.worker.iterators import RewindIterator

WORDS = 60


class Tokenizer:
    """Words that are letters, and what BERT adds to them."""

    inv_vocab = {number: ("##" if number % 3 == 0 else "") + f"w{number}" for number in range(WORDS)}
    vocab_size, cls, sep, mask, pad, eos, eod = WORDS, WORDS - 4, WORDS - 3, WORDS - 2, WORDS - 1, WORDS - 3, WORDS - 3
    unique_identifiers = {"class": "Tokenizer"}


@pytest.fixture
def corpus(tmp_path):
    """A prefix of 40 documents of three sentences."""
    indexed_dataset = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    builder = indexed_dataset.IndexedDatasetBuilder(f"{tmp_path}/corpus.bin", dtype=numpy.int32)
    drawn = numpy.random.RandomState(3)
    for _ in range(40):
        for _ in range(3):
            builder.add_item(torch.from_numpy(drawn.randint(0, WORDS - 4, 20)))
        builder.end_document()
    builder.finalize(f"{tmp_path}/corpus.idx")
    return f"{tmp_path}/corpus"


def bert(corpus, cls=None, **changes):
    from megatron.core.datasets import bert_dataset, indexed_dataset
    from megatron.core.datasets.utils import Split

    config = bert_dataset.BERTMaskedWordPieceDatasetConfig(**{
        **dict(
            random_seed=5, sequence_length=64, blend=([corpus], None), split="1,0,0", tokenizer=Tokenizer(),
            path_to_cache=corpus + ".cache", masking_probability=0.3, short_sequence_probability=0.1,
            masking_max_ngram=3, masking_do_full_word=True, masking_do_permutation=False,
            masking_use_longer_ngrams=False, masking_use_geometric_distribution=False, classification_head=True,
        ),
        **changes,
    })  # fmt: skip
    low = indexed_dataset.IndexedDataset(corpus)
    made = cls or bert_dataset.BERTMaskedWordPieceDataset
    return made(low, corpus, numpy.arange(40, dtype=numpy.int32), 60, Split.train, config)


@pytest.fixture
def loader(train_gpt, monkeypatch):
    monkeypatch.setattr(iterators, "DRAWS_NOTHING", [adapter._reads_by_index])

    def make(data_set):
        torch.manual_seed(7)
        return iter(DataLoader(data_set, batch_size=2, num_workers=2))

    return make


@pytest.mark.parametrize("permute", [False, True])
def test_a_newcomer_reads_the_batches_of_a_masked_data_set_that_the_rank_would_read(corpus, loader, permute):
    data_set = bert(corpus, masking_do_permutation=permute)
    ours, newcomers = (RewindIterator(loader(data_set)) for _ in range(2))
    for _ in range(9):  # the first is read and compared, whatever the data set
        before = ours.position
        next(ours)
        newcomers.skip(*ours.pulled_since(before))
    assert (type(newcomers.inner) is iterators._Behind) is not permute
    for _ in range(3):
        mine, expected = next(newcomers), next(ours)
        assert all(torch.equal(mine[name], expected[name]) for name in expected)


def test_only_megatron_cores_own_classes_over_its_own_files_are_passed_over(train_gpt, corpus):
    from megatron.core.datasets.bert_dataset import BERTMaskedWordPieceDataset

    class Drawing(BERTMaskedWordPieceDataset):
        pass

    Drawing.__module__ = "megatron.core.datasets.of_a_later_version"
    known = bert(corpus)
    assert adapter._reads_by_index(known) and not adapter._reads_by_index(bert(corpus, Drawing))
    known.dataset = [*range(40)]
    assert not adapter._reads_by_index(known)


def mock(kind, **changes):
    """A mock data set as far as `_reads_by_index` looks at it."""
    from megatron.core.datasets import gpt_dataset, multimodal_dataset

    made = object.__new__(getattr(multimodal_dataset if kind == "MockMultimodalDataset" else gpt_dataset, kind))
    made.dataset = object.__new__(gpt_dataset.MockGPTLowLevelDataset)
    made.config, made.index_split = SimpleNamespace(), SimpleNamespace(name="train")
    vars(made).update(changes)
    return made


def test_a_preprocessing_of_the_scripts_own_is_read(train_gpt):
    from megatron.core.datasets.multimodal_dataset import MultimodalDatasetConfig

    config = object.__new__(MultimodalDatasetConfig)
    vars(config)["preprocess_func"] = MultimodalDatasetConfig.preprocess_func
    assert adapter._reads_by_index(mock("MockMultimodalDataset", config=config))
    vars(config)["preprocess_func"] = lambda sample: sample
    assert not adapter._reads_by_index(mock("MockMultimodalDataset", config=config))


def test_a_blend_is_passed_over_if_all_of_it_is(train_gpt, corpus):
    from megatron.core.datasets.blended_dataset import BlendedDataset

    blend = object.__new__(BlendedDataset)
    blend.datasets = [bert(corpus), mock("MockGPTDataset")]
    assert adapter._reads_by_index(blend)
    blend.datasets.append(bert(corpus, masking_do_permutation=True))
    assert not adapter._reads_by_index(blend)


@pytest.mark.parametrize("version, pad, split, read", [
    ((0, 14), 3, "train", True), ((0, 14), -1, "train", False), ((0, 14), -1, "valid", True),
    ((0, 15), 3, "train", False),
])  # fmt: skip
def test_masks_that_items_share_before_0_15_are_read(train_gpt, monkeypatch, version, pad, split, read):
    from megatron.core import package_info

    monkeypatch.setattr(package_info, "MAJOR", version[0])
    monkeypatch.setattr(package_info, "MINOR", version[1])
    changes = dict(
        masks_and_position_ids_are_cacheable=True, _pad_token_id=pad, index_split=SimpleNamespace(name=split)
    )
    assert adapter._reads_by_index(mock("GPTDataset", **changes)) is not read
