"""`m2s reproduce`: from a released layout and a text to both figures, and what is needed where files are missing."""

import json
import math
from pathlib import Path

import pytest
import torch

import m2s
from m2s.cli import main
from m2s.data.documents import find_sources
from m2s.evaluation.bpd import dataset_nelbo
from m2s.evaluation.likelihood import Estimator, Levels, Options, Term, measure
from m2s.evaluation.likelihood.base import needs_masks, no_terms_missing
from m2s.evaluation.published import PUBLISHED, cut_windows, read_text
from plain_networks import LENGTH, dit_shapes, random_tensors
from test_mdlm import hub_config, word_tokenizer, write_hub

pytestmark = pytest.mark.usefixtures("without_shape_hook")
WORDS = ["[UNK]", "[MASK]", "[EOS]", *(f"w{i}" for i in range(20))]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny random checkpoint in MDLM's published layout, with a tokenizer, and a text of four documents."""
    monkeypatch.chdir(tmp_path)
    folder = write_hub(tmp_path / "mdlm", hub_config("mdlm", len(WORDS)), random_tensors(dit_shapes(len(WORDS))))
    word_tokenizer(folder / "tokenizer.json", WORDS)
    texts = [" ".join(f"w{(i * 7 + 3 * n) % 20}" for i in range(9 + n)) for n in range(4)]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return tmp_path


def test_both_figures_are_printed_and_written(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ours is exp of the nats per token of windows that begin and end with the end token, by the authors' mean and the NELBO.

    MDLM's mean is -log mu of the clean token at masks times 1/t, over t = 0.001 + 0.999 u: 1/0.999 of the integral.
    """
    words = ["reproduce", "mdlm-owt", "--data", "text.jsonl", "--checkpoint", "mdlm", "--passes", "3", "--out", "x.json"]
    main([*words, "--device", "cpu"])
    printed = capsys.readouterr().out
    found = json.loads((place / "x.json").read_text())
    model, head = (checkpoint := m2s.load(place / "mdlm"))
    encode, end = checkpoint.tokenizer.encode, checkpoint.tokenizer.end
    assert end == WORDS.index("[EOS]") - 1  # the mask is before it, and is no token
    stream = []
    for line in (place / "text.jsonl").read_text().splitlines():
        stream += [*encode(json.loads(line)["text"]), end]
    inner, step = [], LENGTH - 2
    for first in range(0, len(stream) - step + 1, step):
        inner.append([end, *stream[first : first + step], end])
    rows = torch.tensor(inner)
    assert found["windows"] == len(rows) and found["left_out"] == len(stream) % step
    nelbo = dataset_nelbo(model, head, rows, 3, 1e-3, 0, 16)
    for term in ("nelbo", "integral"):
        nats = float(nelbo.term(term).sum(1).mean()) / rows.numel()
        assert found[term]["perplexity"]["value"] == pytest.approx(math.exp(nats), rel=1e-5)
        assert f"{math.exp(nats):.2f}" in printed
    for text in (
        "23.21",
        "not a bound: lacks reconstruction, prior, length of the interval",
        "not a bound with all terms",
        "an upper bound",
        "3 passes",
        "seconds",
        "table 2",
    ):
        assert text in printed
    drawn = measure(model, head, rows, Estimator("", "", of_the_authors, no_terms_missing, needs_masks), 3, 0)
    theirs = found["as_published"]["perplexity"]
    assert theirs["value"] == pytest.approx(math.exp(float(drawn.total.mean()) / LENGTH), rel=1e-5)
    assert f"{theirs['value']:.2f}" in printed and theirs["rows_error"] > 0
    assert "departure: windows have 10 tokens" in printed and "the published one is kuleshov-group/mdlm-owt" in printed
    assert found["published"]["perplexity"] == 23.21


class AuthorsTimes(Levels):
    """t = (1 - eps) u + eps with weight 1, as in the released code of MDLM, and masks of probability 1 - alpha_t."""

    def draw(self, process: m2s.Process, u: torch.Tensor, sizes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (1 - 1e-3) * u + 1e-3, torch.ones_like(u)

    def nodes(self, process: m2s.Process, size: int, breaks: tuple[float, ...] = ()) -> list[tuple[float, float]]:
        raise NotImplementedError


def of_the_authors(head: m2s.Head, options: Options) -> list[Term]:
    """-log mu_{x_0} dsigma/expm1(sigma) at masks, sigma the total noise of the log-linear schedule."""

    def loss(head: m2s.Head, output: torch.Tensor, x_0: torch.Tensor, x_t: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        sigma = -torch.log1p(-(1 - 1e-3) * t)
        rate = (1 - 1e-3) / (1 - (1 - 1e-3) * t)
        log_mu = output.double()[..., : head.process.vocab].log_softmax(-1)
        nats = -log_mu.gather(-1, x_0.unsqueeze(-1)).squeeze(-1) * (rate / torch.expm1(sigma))[:, None]
        return torch.where(x_t == head.process.mask, nats, 0.0)

    return [Term("integral", AuthorsTimes(), loss)]


def test_windows_of_a_stream(place: Path) -> None:
    tokenizer = m2s.load(place / "mdlm").tokenizer
    sources = find_sources("text.jsonl", test="")
    stream, left_out = cut_windows(sources, tokenizer, 7, "stream")
    wrapped, _ = cut_windows(sources, tokenizer, 9, "wrapped")
    assert torch.equal(wrapped[:, 1:-1], stream) and (wrapped[:, [0, -1]] == tokenizer.end).all()
    assert stream.numel() + left_out == sum(9 + n + 1 for n in range(4))


def test_the_text_of_a_zero_shot_figure_is_detokenized(place: Path) -> None:
    """The original text, in the column of its data set; a blank row is an end token, as in the code of SEDD and MDLM."""
    rows = ["w1 n't w2 N <unk> w3", "", "w4 's"]
    (place / "ptb.jsonl").write_text("".join(json.dumps({"sentence": row}) + "\n" for row in rows))
    sources = read_text(PUBLISHED["mdlm-ptb"], "ptb.jsonl")
    assert [document.text for document in sources[0].read(0)] == ["w1n't w2 1 ? w3", "", "w4's"]
    tokenizer = m2s.load(place / "mdlm").tokenizer
    windows, _ = cut_windows(sources, tokenizer, 3, "stream")
    stream = [*tokenizer.encode("w1n't w2 1 ? w3"), tokenizer.end, tokenizer.end, *tokenizer.encode("w4's"), tokenizer.end]
    assert windows.flatten().tolist() == stream[: windows.numel()]


def error(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as stop:
        main(["reproduce", *words])
    assert stop.value.code == 2
    return capsys.readouterr().err


def test_missing_files_are_named(place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Offline: the checkpoint, the merges and the text, with what to do."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    needed = "needed are the checkpoint kuleshov-group/mdlm-owt"
    for words in (
        ("mdlm-owt",),
        ("mdlm-owt", "--data", "nothing.jsonl", "--checkpoint", "mdlm"),
        ("mdlm-owt", "--data", "text.jsonl", "--checkpoint", "nowhere"),
    ):
        message = error(capsys, *words)
        assert needed in message and "split='train[-100000:]'" in message and "m2s data download gpt2" in message
    (place / "mdlm" / "tokenizer.json").rename(place / "tokenizer.json")
    assert "does not say which is the mask" in error(capsys, "mdlm-owt", "--data", "text.jsonl", "--checkpoint", "mdlm")
    assert "there is no published result" in error(capsys, "mdlm-owl")


def test_the_list_of_results(capsys: pytest.CaptureFixture[str]) -> None:
    main(["reproduce"])
    printed = capsys.readouterr().out
    for name, entry in PUBLISHED.items():
        assert f"{name} " in printed and entry.checkpoint in printed
        assert entry.estimator == name.split("-")[0]  # each paper evaluates by its own
        assert entry.perplexity > 1 and entry.length in (512, 1024) and "bound" in entry.terms
