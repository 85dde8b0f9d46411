"""Texts for training: read from files and datasets, split, tokenised, and packed into blocks.

Documents are packed one after the other. In a block, positions restart with each of them, from which the model knows
what neither attention nor n-grams may look back to.
"""

import math
import random
from functools import lru_cache
from pathlib import Path

import torch
from tqdm import tqdm

from .tokenization.tokenization_engram import EngramTokenizer


DATASET_FORMATS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}


def read_documents(sources: list[str], column: str, split: str) -> list[str]:
    """Texts, one a document: a text file, each text file in a folder, or each row of a dataset."""
    documents, skipped = [], []
    for path in map(Path, sources):
        if not path.exists() and (path.suffix or path.is_absolute() or "/" not in str(path)):
            raise ValueError(f"{path} does not exist. (A dataset on the Hub is named owner/name.)")
        saved_dataset = (path / "state.json").exists() or (path / "dataset_dict.json").exists()
        if saved_dataset or not path.exists() or path.suffix in DATASET_FORMATS:
            documents += read_dataset(str(path), column, split)
            continue
        files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
        files = [file for file in files if not any(part.startswith(".") for part in file.relative_to(path).parts)]
        for file in files:
            try:
                documents.append(file.read_text(encoding="utf-8"))
            except UnicodeDecodeError:
                skipped.append(file)
    if skipped:
        print(f"skipped {len(skipped)} files that are not UTF-8 text, {skipped[0]} for one")
    documents = [text for text in documents if text and text.strip()]
    if not documents:
        raise ValueError(f"{', '.join(sources)} holds no text.")
    return documents


def read_dataset(source: str, column: str, split: str) -> list[str]:
    """One column of a dataset: a saved one, a file of `DATASET_FORMATS`, or `owner/name[:config]` on the Hub."""
    import datasets

    if Path(source).is_dir():
        dataset = datasets.load_from_disk(source)
        dataset = dataset[split] if isinstance(dataset, datasets.DatasetDict) else dataset
    elif Path(source).is_file():
        dataset = datasets.load_dataset(DATASET_FORMATS[Path(source).suffix], data_files=source, split="train")
    else:
        name, _, config = source.partition(":")
        dataset = datasets.load_dataset(name, config or None, split=split)
    if column not in dataset.column_names:
        raise ValueError(f"{source} has no column {column!r}, but {dataset.column_names}: choose with --text-column.")
    return dataset[column]


def hold_out(documents: list[str], share: float, seed: int) -> tuple[list[str], list[str]]:
    """Documents to train on and to evaluate on; where there are too few to choose from, each one's end is held out."""
    if share * len(documents) < 1:
        cuts = [(text, len(text) - math.ceil(share * len(text))) for text in documents]
        return [text[:cut] for text, cut in cuts], [text[cut:] for text, cut in cuts]
    chosen = set(random.Random(seed).sample(range(len(documents)), round(share * len(documents))))
    return [d for i, d in enumerate(documents) if i not in chosen], [documents[i] for i in sorted(chosen)]


def pack(tokenizer: EngramTokenizer, documents: list[str], length: int, what: str) -> dict[str, torch.Tensor]:
    """Token ids and positions, int32 `[n_blocks, length]`: documents one after the other, cut into blocks.

    Positions restart with every document and block, from which the model knows what neither attention nor n-grams may
    look back to. A rest that fills no block is dropped.
    """
    pieces, end = [], [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    for start in tqdm(range(0, len(documents), 256), desc=f"tokens of the {what}", disable=None, leave=False):
        for encoding in tokenizer.backend_tokenizer.encode_batch_fast(documents[start : start + 256]):
            ids = encoding.ids if encoding.ids[-1:] == end else encoding.ids + end
            pieces.append(torch.tensor(ids, dtype=torch.int32))
    ids = torch.cat(pieces)
    n_blocks = len(ids) // length
    if n_blocks == 0:
        raise ValueError(f"The {what} has {len(ids)} tokens, fewer than one block: give more text, or a --block-size "
                         f"below {length}. (For no evaluation: --eval-share 0.)")  # fmt: skip
    is_first = torch.cat([torch.arange(len(piece)) for piece in pieces]) == 0
    is_first, ids = (values[: n_blocks * length].view(n_blocks, length) for values in (is_first, ids))
    columns = torch.arange(length, dtype=torch.int32)
    return {"input_ids": ids, "position_ids": columns - torch.where(is_first, columns, 0).cummax(1).values}


def make_batch(blocks: dict[str, torch.Tensor], indices: list[int], device: torch.device) -> dict[str, torch.Tensor]:
    """The model's inputs int64 `[B, L]` of some blocks. A document's first token is not to be predicted."""
    batch = {name: values[indices].long().to(device) for name, values in blocks.items()}
    return batch | {"labels": batch["input_ids"].masked_fill(batch["position_ids"] == 0, -100)}


@lru_cache(maxsize=2)
def epoch_order(n_blocks: int, seed: int, epoch: int) -> list[int]:
    return torch.randperm(n_blocks, generator=torch.Generator().manual_seed(seed + 1_000_003 * epoch)).tolist()


def step_indices(n_blocks: int, seed: int, step: int, size: int) -> list[int]:
    """The blocks of a step: a function of the step alone, so that a resumed run needs no other memory of the order."""
    places = (divmod(i, n_blocks) for i in range(step * size, (step + 1) * size))
    return [epoch_order(n_blocks, seed, epoch)[place] for epoch, place in places]
