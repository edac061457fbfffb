"""Zero-shot perplexity: detokenizers on lines as the data sets have them, windows, and the command."""

import json
import math
from pathlib import Path

import pytest
import torch

import m2s
from m2s.cli import main
from m2s.data import Bytes
from m2s.data.tokenizer.characters import Characters
from m2s.evaluation.likelihood.conditional import conditional_nats
from m2s.evaluation.zero_shot import TASKS, make_windows, read_documents
from small_runs import user_error

# Lines in the form of the data sets, and what the released code of SEDD makes of them.
SAMPLES = [
    ("wikitext2", " = = Early life = = \n", " == Early life ==\n"),
    ("wikitext2", "", ""),
    (
        "wikitext2",
        "The game 's opening theme , which sold 1 @,@ 500 copies in a 3 @.@ 5 @-@ week run ( its best ) , was re @-@ done . It",
        "The game's opening theme, which sold 1,500 copies in a 3.5-week run (its best), was re-done. It",
    ),
    (
        "wikitext103",
        'It was described as " a modern classic " ; the players \' choice at 5 ° C . \n',
        'It was described as "a modern classic"; the players\' choice at 5°C.\n',
    ),
    (
        "ptb",
        "the company does n't expect profit to exceed $ N million <unk> said",
        "the company doesn't expect profit to exceed $1 million ? said",
    ),
    ("ptb", "it 's up N N from a buyer ' s or N \\/ N", "it's up 1 1 from a buyer ' s or 1 / N"),
    (
        "lm1b",
        "He said , \" We don 't know why the bank 's profit ( $ 5 million ) fell . \"",
        "He said, \"We don't know why the bank's profit ($5 million) fell.\"",
    ),
    ("lm1b", "Is it so ? No , and / or yes .", "Is it so? No, and/or yes."),
    ("lambada", " “i ’m not sure,” she said ", '\n"i ’m not sure," she said'),
    ("ag_news", "Oil prices fell , analysts said .", "Oil prices fell , analysts said ."),
    (
        "arxiv",
        "we show that @xmath0 holds ( see @xcite ) , as expected .",
        "we show that @xmath0 holds (see @xcite), as expected.",
    ),
    ("pubmed", "patients [ n = 12 ] were treated ; none died .", "patients [n = 12] were treated; none died."),
]


@pytest.mark.parametrize(("task", "text", "expected"), SAMPLES)
def test_detokenizers(task: str, text: str, expected: str) -> None:
    assert TASKS[task].detokenize(text) == expected


@pytest.mark.parametrize("task", TASKS)
def test_running_text_is_left_alone(task: str) -> None:
    """A detokenizer does not change text without tokenization, other than what it adds at the start."""
    text = "She said, \"It's 3.5 (or 4) o'clock; isn't it?\" Then they left."
    assert TASKS[task].detokenize(text).strip() == text


def test_a_task_says_how_to_write_its_text() -> None:
    """The data sets that are scripts are read from the hub's conversion, where a configuration is a folder."""
    code = TASKS["arxiv"].as_file("arxiv")
    expected = "data_dir='arxiv', revision='refs/convert/parquet', split='validation').to_json('arxiv.jsonl')"
    assert code == f"datasets.load_dataset('armanc/scientific_papers', {expected}"
    assert "name='wikitext-2-raw-v1', split='validation'" in TASKS["wikitext2"].as_file("x")


def test_windows_of_joined_documents() -> None:
    """The stream is cut into windows of the length; with a stride every window has context. Each token is predicted once.

    A blank document counts where documents are joined, and not where each is cut by itself.
    """
    task, documents = TASKS["ag_news"], ["one two", " ", "three"]
    stream = [*b"one two", 256, *b" ", 256, *b"three", 256]
    for stride in (None, 3, 1):
        found = make_windows(documents, task, Bytes(), 5, stride=stride)
        assert [token for request in found.requests for token in request.continuation] == stream
        assert all(len(request.tokens) <= 5 for request in found.requests)
        if stride is not None:
            assert all(len(request.tokens) == 5 for request in found.requests[1:])
        assert (found.tokens, found.words, found.documents, found.characters) == (len(stream), 6, 3, 13)
    separate = make_windows(documents, task, Bytes(), 5, wrap=False)
    assert [request.tokens for request in separate.requests] == [
        tuple(stream[:5]),
        tuple(stream[5:8]),
        tuple(stream[10:15]),
        tuple(stream[15:]),
    ]
    assert "every document cut by itself" in separate.rule and "joined" in found.rule
    with pytest.raises(ValueError, match="stride"):
        make_windows(documents, task, Bytes(), 5, stride=6)


def test_documents_of_local_files(tmp_path: Path) -> None:
    """The column of the data set, or that of any text."""
    (tmp_path / "a.jsonl").write_text('{"sentence": "a b"}\n{"sentence": "c"}\n')
    (tmp_path / "b.jsonl").write_text('{"text": "d"}\n')
    assert read_documents(TASKS["ptb"], str(tmp_path / "a.jsonl")) == ["a b", "c"]
    assert read_documents(TASKS["ptb"], str(tmp_path / "b.jsonl")) == ["d"]
    with pytest.raises(ValueError, match=r"no\.jsonl"):
        read_documents(TASKS["ptb"], str(tmp_path / "no.jsonl"))


def test_lines_of_a_plain_text_are_the_rows_of_the_hub(tmp_path: Path) -> None:
    """The files of WikiText and the Penn Treebank, and the rows that the data sets of the hub have of them."""
    (tmp_path / "wiki.txt").write_text(" \n = Title = \n \n A b . \n")
    assert read_documents(TASKS["wikitext2"], str(tmp_path / "wiki.txt")) == ["", " = Title = \n", "", " A b . \n"]
    (tmp_path / "ptb.txt").write_text(" a b \n N <unk> \n")
    assert read_documents(TASKS["ptb"], str(tmp_path / "ptb.txt")) == ["a b", "N <unk>"]
    (tmp_path / "news.txt").write_text("one\ntwo\n")
    assert read_documents(TASKS["ag_news"], str(tmp_path / "news.txt")) == ["one\ntwo"]


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Perplexities per token and per word are those of the estimates of all windows; the rule is printed."""
    torch.manual_seed(0)
    config = m2s.models.DiTConfig(states=28, width=8, depth=1, heads=2, condition_width=8)
    head = m2s.Posterior(m2s.Absorbing(27, m2s.Linear()))
    m2s.save(tmp_path / "model", m2s.models.DiT(config), head, {"kind": "text", "length": 6}, Characters())
    (tmp_path / "text.txt").write_text("abc de f\n<|endoftext|>\nghij")
    command = ["evaluate", "zero-shot", str(tmp_path / "model"), "--data", str(tmp_path / "text.txt"), "--device", "cpu"]
    main([*command, "--task", "ag_news", "--passes", "3", "--out", str(tmp_path / "found.json")])
    found, printed = json.loads((tmp_path / "found.json").read_text()), capsys.readouterr().out
    loaded = m2s.load(tmp_path / "model")
    made = make_windows(["abc de f", "ghij"], TASKS["ag_news"], Characters(), 6)
    nats = float(conditional_nats(loaded.model, loaded.head, made.requests, 3, 0)[0].sum())
    assert found["nats"] == pytest.approx(nats, rel=1e-5)
    assert found["perplexity_per_token"] == pytest.approx(math.exp(nats / 12), rel=1e-5)
    assert found["perplexity_per_word"] == pytest.approx(math.exp(nats / 6), rel=1e-5)
    assert made.rule in printed and "upper bounds" in printed
    main([*command, "--task", "ag_news", "--estimator", "mdlm"])
    assert "NO upper bounds: mdlm lacks reconstruction" in capsys.readouterr().out
    assert "no zero-shot task of that name" in user_error(capsys, *command, "--task", "wikitext")
    assert "it needs uniform noise" in user_error(capsys, *command, "--task", "ptb", "--estimator", "udlm")
