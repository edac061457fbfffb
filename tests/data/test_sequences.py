"""`Sequences` and `collate`: what is read, how it is padded and divided, and which errors say what is wrong."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

import m2s
from m2s.data import Sequences, collate
from m2s.data.source import Source, fingerprint, is_padded
from m2s.errors import UserError

pytestmark = pytest.mark.usefixtures("without_shape_hook")
RAGGED = [[3, 1], [2], [0, 1, 2, 3], [1, 1, 1], [2, 0]]


def everything(source: Sequences) -> list[list[int]]:
    """All examples without their padding, sorted."""
    found = []
    for batch in (source.train(torch.arange(source.size)), source.validation(torch.arange(source.held_out))):
        for row, tokens in enumerate(batch.x_0.tolist()):
            length = source.length if batch.weight is None else int(batch.weight[row].sum())
            found.append(tokens[:length])
    return sorted(found)


@pytest.mark.parametrize("container", ["tensor", "array", "uint8", "list"])
def test_an_array_is_read_in_any_form(container: str) -> None:
    x = torch.randint(6, (40, 7))
    given = {"tensor": x, "array": x.numpy(), "uint8": x.byte(), "list": x.tolist()}[container]
    source = Sequences(given)
    assert isinstance(source, Source) and not is_padded(source)
    assert (source.vocab, source.length, source.size, source.held_out) == (int(x.max()) + 1, 7, 36, 4)
    assert source.inferred and source.train(torch.tensor([0])).weight is None
    assert everything(source) == sorted(x.tolist())


def test_shorter_sequences_are_padded_and_weigh_nothing() -> None:
    source = Sequences(RAGGED, vocab=9)
    assert is_padded(source) and (source.vocab, source.length) == (9, 4) and not source.inferred
    assert everything(source) == sorted(RAGGED)
    batch = source.train(torch.arange(source.size))
    assert batch.weight is not None and bool((batch.x_0[batch.weight == 0] == 0).all())
    longer = Sequences(RAGGED, length=6)
    assert longer.length == 6 and everything(longer) == sorted(RAGGED)


def test_a_dataset_of_torch_is_read() -> None:
    class Ragged(Dataset):
        def __len__(self) -> int:
            return len(RAGGED)

        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.tensor(RAGGED[index])

    assert everything(Sequences(Ragged())) == sorted(RAGGED)


class Columns:
    """Columns by name, as in a DataFrame: an index of a row is unknown."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, column: str) -> np.ndarray:
        raise KeyError(column)


class Table(Columns):
    def to_numpy(self) -> np.ndarray:
        return self.values


class Array(Columns):
    def __array__(self, dtype: object = None, copy: object = None) -> np.ndarray:
        return self.values


@pytest.mark.parametrize("kind", [Table, Array])
def test_a_table_is_read(kind: type) -> None:
    x = np.random.default_rng(0).integers(0, 6, (40, 7))
    for values in (x, x.astype(np.uint16), x.astype(object)):  # integers that may be missing are objects
        assert everything(Sequences(kind(values))) == sorted(x.tolist())
    ragged = np.empty(len(RAGGED), dtype=object)
    ragged[:] = RAGGED
    assert everything(Sequences(kind(ragged))) == sorted(RAGGED)


def test_pairs_and_tensor_data_sets_are_read_with_their_labels() -> None:
    x = torch.arange(30).unsqueeze(-1).expand(30, 3)
    labels = x[:, 0] % 4
    dataset = TensorDataset(x, labels)
    pairs = list(zip(x.tolist(), labels.tolist(), strict=True))
    for given in (
        dataset,
        Subset(dataset, range(30)),
        pairs,
        [list(pair) for pair in pairs],
        [(x[i], labels[i]) for i in range(30)],
    ):
        source = Sequences(given)
        assert everything(source) == x.tolist() and source.classes == 4
        for batch in (source.train(torch.arange(source.size)), source.validation(torch.arange(source.held_out))):
            assert torch.equal(batch.label, batch.x_0[:, 0] % 4)
    for given in (TensorDataset(x), Subset(TensorDataset(x), range(30))):
        assert Sequences(given).classes is None and everything(Sequences(given)) == x.tolist()
    assert Sequences(dataset, labels=labels + 3).classes == 7 and Sequences(dataset, labels=False).classes is None
    with_validation = Sequences(dataset, validation_x=pairs[:2])
    assert with_validation.validation(torch.arange(2)).label.tolist() == [0, 1]
    assert Sequences([[4, 2], [1, 3]]).classes is None  # two tokens are not a token with a label


@pytest.mark.parametrize(("count", "length", "held_out"), [(2, 3, 1), (99, 10, 9), (9_999, 10, 999), (10_000, 10, 100)])
def test_how_much_is_held_out(count: int, length: int, held_out: int) -> None:
    """A tenth of fewer than 100,000 tokens, and a hundredth of more."""
    x = torch.arange(count).unsqueeze(-1).expand(count, length)
    source = Sequences(x)
    assert (source.held_out, source.size) == (held_out, count - held_out)
    assert everything(source) == x.tolist()


def test_held_out_examples_depend_on_the_seed_and_keep_their_labels() -> None:
    x = torch.arange(100).unsqueeze(-1).expand(100, 3)
    one, same, other = (Sequences(x, labels=torch.arange(100) % 7, seed=seed) for seed in (1, 1, 2))
    rows = torch.arange(one.held_out)
    assert torch.equal(one.validation(rows).x_0, same.validation(rows).x_0)
    assert not torch.equal(one.validation(rows).x_0, other.validation(rows).x_0)
    for batch in (one.train(torch.arange(one.size)), one.validation(rows)):
        assert torch.equal(batch.x_0[:, 0] % 7, batch.label)
    assert one.classes == 7
    assert fingerprint(one) == fingerprint(same) != fingerprint(other)


def test_given_validation_is_used() -> None:
    source = Sequences([[1, 2], [3, 0]], validation_x=[[5]], labels=[0, 1], validation_labels=[3])
    batch = source.validation(torch.tensor([0]))
    assert source.size == 2 and source.vocab == 6 and source.classes == 4 and source.padded
    assert batch.x_0.tolist() == [[5, 0]] and batch.weight.tolist() == [[1, 0]] and batch.label.tolist() == [3]


def test_held_out_examples_may_be_longer_or_shorter() -> None:
    """All are padded to the longest, and `length` is an argument of `Sequences` only."""
    for examples, validation, length in (([[1, 2], [3]], [[4, 5, 6]], 3), ([[1, 2, 3], [3, 1, 2]], [[4], [5, 6]], 3)):
        source = Sequences(examples, validation_x=validation)
        train, held_out = source.train(torch.arange(2)), source.validation(torch.arange(len(validation)))
        assert source.length == length == train.x_0.shape[1] == held_out.x_0.shape[1] and source.padded
        for batch, given in ((train, examples), (held_out, validation)):
            assert [row[weight > 0].tolist() for row, weight in zip(batch.x_0, batch.weight, strict=True)] == given
    tensor = Sequences(torch.ones(4, 2, dtype=torch.long), validation_x=torch.ones(3, 5, dtype=torch.long))
    assert tensor.length == 5 and tensor.train(torch.tensor([0])).weight.tolist() == [[1, 1, 0, 0, 0]]
    with pytest.raises(UserError, match="length is 2, but it must be at least 3"):
        Sequences([[1, 2], [3]], validation_x=[[4, 5, 6]], length=2)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"examples": torch.rand(4, 3)}, "x holds float32, but it must hold integers"),
        ({"examples": np.ones((4, 3), bool)}, "x holds bool"),
        ({"examples": torch.zeros(4, 2, 2, dtype=torch.long)}, r"shape \[4, 2, 2\].*reshape"),
        (
            {"examples": torch.tensor([[0, -1], [1, 1]])},
            "x holds -1, but tokens are numbered from 0 on: leave padding out, as in",
        ),
        ({"examples": [[0, 1], [1, -100]]}, r"x\[1\] holds -100.* leave padding out.* and m2s pads them$"),
        ({"examples": [[1], []]}, r"x\[1\] is empty"),
        ({"examples": []}, "x is empty"),
        ({"examples": "ACGT"}, "x is a text.*tokenizer"),
        ({"examples": ["ACGT", "AC"]}, r"x\[0\] holds strings such as 'ACGT'.*m2s.data.Bytes"),
        ({"examples": [list("ACGT"), list("AC")]}, r"x\[0\] holds strings such as 'A'.*m2s.data.Characters"),
        ({"examples": np.array([["a", 1], ["b", 2]], dtype=object)}, "x holds strings such as 'a'.*m2s.data.Bytes"),
        ({"examples": {"tokens": RAGGED}}, r"x is a dict.*give one entry, x\['tokens'\]"),
        ({"examples": [{"tokens": [1]}, {"tokens": [2]}]}, r"x\[0\] holds a dict.*take the column"),
        ({"examples": DataLoader(RAGGED)}, "x is a DataLoader.*loader.dataset"),
        ({"examples": [[[1], [2, 3]], [[1], [2]]]}, r"x\[0\] holds lists of different lengths"),
        ({"examples": [([1, 2], 0), [1, 2, 3]]}, r"x\[1\] is no pair \(sequence, label\), but x\[0\] is one"),
        (
            {"examples": [([1, 2], "cat"), ([1], "dog")]},
            "of x holds strings such as 'cat'.*np.unique.*labels=False",
        ),
        ({"examples": TensorDataset(torch.zeros(3, 2), torch.zeros(3, 4))}, r"shapes \[3, 2\], \[3, 4\].*labels \[N\]"),
        ({"examples": RAGGED, "labels": list("abcde")}, "labels holds strings such as 'a'.*np.unique"),
        ({"examples": RAGGED, "labels": [0, 1, -1, 0, 0]}, "labels holds -1, but labels are numbered from 0 on$"),
        ({"examples": RAGGED, "labels": True}, "labels is True, but x has no labels"),
        ({"examples": RAGGED, "vocab": 9_000_000_000}, "vocab is 9000000000.*np.unique"),
        ({"examples": [[0, 9_000_000_000], [1, 2]]}, "vocab is 9000000001.*np.unique"),
        ({"examples": torch.arange(5)}, r"shape \[5\].*x\[None\]"),
        ({"examples": iter([[1]])}, "has no length"),
        ({"examples": [[1, 2]]}, "at least 2 are needed"),
        ({"examples": RAGGED, "vocab": 3}, "vocab is 3.*at least 4: the greatest token is 3"),
        ({"examples": RAGGED, "length": 2}, "length is 2.*at least 4"),
        ({"examples": RAGGED, "labels": [0, 1]}, "labels has shape .2., but there are 5 examples"),
        ({"examples": RAGGED, "labels": [0.5] * 5}, "labels holds float64"),
        ({"examples": RAGGED, "labels": [0] * 5, "validation_x": [[1]]}, "validation_labels"),
    ],
)
def test_errors(given: dict, message: str) -> None:
    with pytest.raises((UserError, TypeError), match=message):
        Sequences(**given)


def test_collate_in_a_data_loader() -> None:
    pairs = [(torch.tensor(sequence), number % 2) for number, sequence in enumerate(RAGGED)]
    (batch,) = DataLoader(pairs, batch_size=5, collate_fn=collate)
    assert isinstance(batch, m2s.data.Batch)
    assert [row[: len(given)] for row, given in zip(batch.x_0.tolist(), RAGGED, strict=True)] == RAGGED
    assert batch.weight.sum(1).tolist() == [2, 1, 4, 3, 2] and batch.label.tolist() == [0, 1, 0, 1, 0]
    (plain,) = DataLoader([pair[0] for pair in pairs], batch_size=5, collate_fn=collate)
    assert plain.label is None and torch.equal(plain.x_0, batch.x_0)
    assert collate([[4, 2], [1, 3]]).label is None  # two tokens are not a token with a label
