"""Text that is on every machine, cut into token windows.

The default text is the Python standard library's own sources. Whole files go either to training
or to the held-out set, so no held-out line has a neighbour in training.
"""

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

import grain
import numpy as np
from jaxtyping import Int
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

BYTES = pre_tokenizers.ByteLevel.alphabet()
NOT_OURS = {"site-packages", "dist-packages", "test", "tests", "idle_test"}

Document = Int[np.ndarray, " n"]


class Windows(TypedDict):
    """Some windows of S tokens; ``segment_ids`` tells the documents in a window apart."""

    tokens: Int[np.ndarray, "*B S"]
    segment_ids: Int[np.ndarray, "*B S"]


@dataclass(frozen=True)
class Corpus:
    """Tokenised documents; equal fingerprints mean equal tokens."""

    train: list[Document]
    held_out: list[Document]
    fingerprint: str

    def unigram_entropy(self) -> float:
        """Nats a token of the best model of the held-out text that ignores context."""
        counts = np.bincount(np.concatenate(self.held_out))
        p = counts[counts > 0] / counts.sum()
        return float(-(p * np.log(p)).sum())


def write_whole(path: Path, text: str) -> None:
    """Writes a file that is there whole or not at all, wherever the process is killed."""
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def read_texts(folder: Path | None) -> list[str]:
    """The text files of ``folder`` in the order of their names; None means Python's sources."""
    if folder is None:
        root = Path(sysconfig.get_path("stdlib"))
        paths = [p for p in root.rglob("*.py") if not NOT_OURS & set(p.parts)]
    else:
        root = folder
        paths = [p for p in root.rglob("*") if p.is_file()]
    texts = []
    for path in sorted(paths):
        try:
            texts.append(path.read_text(encoding="utf-8"))
        except UnicodeDecodeError:
            continue
    if len(texts) < 2:
        raise ValueError(f"need two text files, to train on and to hold out; {root}: {len(texts)}")
    return texts


def train_tokenizer(texts: list[str], vocab: int) -> Tokenizer:
    """A byte-level BPE, which has a token for any text."""
    if vocab < len(BYTES):
        raise ValueError(f"vocab must hold the {len(BYTES)} bytes, got {vocab}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocab, initial_alphabet=BYTES, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def load_corpus(folder: Path | None, vocab: int, hold_out_every: int, cache: Path) -> Corpus:
    """Reads and tokenises the text, and holds out one file in ``hold_out_every``."""
    if hold_out_every < 2:
        raise ValueError(f"hold_out_every must leave files to train on, got {hold_out_every}")
    texts = read_texts(folder)
    held_out = texts[::hold_out_every]
    train = [text for i, text in enumerate(texts) if i % hold_out_every]

    key = hashlib.sha256(repr((vocab, hold_out_every, texts)).encode())
    fingerprint = key.hexdigest()[:16]
    path = cache / f"bpe-{fingerprint}.json"
    if not path.exists():
        cache.mkdir(parents=True, exist_ok=True)
        write_whole(path, train_tokenizer(train, vocab).to_str())
    tokenizer = Tokenizer.from_file(str(path))

    def encode(texts: list[str]) -> list[Document]:
        return [np.array(e.ids, np.int32) for e in tokenizer.encode_batch(texts)]

    return Corpus(encode(train), encode(held_out), fingerprint)


def pack(documents: list[Document], window: int, multiple_of: int = 1) -> Windows:
    """Lays documents end to end and cuts windows, their number padded to ``multiple_of``.

    Each padding token is a document of its own, so that nothing is predicted from it or for it.
    """
    tokens = np.concatenate(documents)
    segment_ids = np.repeat(np.arange(len(documents)), [len(d) for d in documents])
    padding = -len(tokens) % (window * multiple_of)
    tokens = np.pad(tokens, (0, padding))
    segment_ids = np.concatenate([segment_ids, len(documents) + np.arange(padding)])
    return Windows(
        tokens=tokens.reshape(-1, window),
        segment_ids=segment_ids.astype(np.int32).reshape(-1, window),
    )


def dataset(windows: Windows) -> grain.MapDataset[Windows]:
    """The windows one by one, in their order."""
    rows = [
        Windows(tokens=tokens, segment_ids=segment_ids)
        for tokens, segment_ids in zip(windows["tokens"], windows["segment_ids"], strict=True)
    ]
    return grain.MapDataset.source(rows)


def training_batches(
    windows: Windows, batch: int, accumulate: int, seed: int
) -> grain.DatasetIterator[Windows]:
    """Endless shuffled batches ``[accumulate, batch, S]``; the iterator's state can be saved."""
    shuffled = dataset(windows).seed(seed).shuffle().repeat()
    return iter(shuffled.batch(batch).batch(accumulate).to_iter_dataset())
