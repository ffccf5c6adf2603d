"""Placeholders of harness and evaluator commands: ours are filled, other braces are left alone,
mistakes are told before a run starts."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre_megatron.config.rollout import HarnessConfig
from gyre_megatron.errors import ConfigError
from gyre_megatron.harness.commands import check_words, fill_words, split_command
from gyre_megatron.harness.extensions import load_extensions

VALUES = {"prompt": "do {task} {it}", "prompt_file": "/p", "workspace": "/w", "task": "/t"}


def filled(command: str) -> list[str]:
    words = split_command(command, "command")
    check_words(words, VALUES, "command")
    return fill_words(words, VALUES)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (
            """claude -p {prompt} --settings '{"a": 1}'""",
            ["claude", "-p", "do {task} {it}", "--settings", '{"a": 1}'],
        ),
        ("""x '{"a": {"b": {}}}'""", ["x", '{"a": {"b": {}}}']),
        ("""x '{"in": {prompt_file}}'""", ["x", '{"in": /p}']),
        (
            "sh -c 'echo ${HOME} $HOME ${prompt} {a,b} {0} {}'",
            ["sh", "-c", "echo ${HOME} $HOME ${prompt} {a,b} {0} {}"],
        ),
        ("curl -w %{http_code} -d @{prompt_file}", ["curl", "-w", "%{http_code}", "-d", "@/p"]),
        (
            "git log HEAD@{upstream} '#{pane}' '\\{x}'",
            ["git", "log", "HEAD@{upstream}", "#{pane}", "\\{x}"],
        ),
        (
            "docker ps --format '{{.Names}}' '{{ x }}'",
            ["docker", "ps", "--format", "{{.Names}}", "{{ x }}"],
        ),
        (
            "echo {prompt!r} {prompt:>9} {task.name} {task[0]}",
            ["echo", "{prompt!r}", "{prompt:>9}", "{task.name}", "{task[0]}"],
        ),
        ("awk '{print $1}' '{' '}' '}{'", ["awk", "{print $1}", "{", "}", "}{"]),
        ("x {{prompt}} {{other}}", ["x", "{prompt}", "{other}"]),
        ("run -v {workspace}:/work:{task}", ["run", "-v", "/w:/work:/t"]),
    ],
)
def test_only_our_names_are_filled(command: str, words: list[str]) -> None:
    assert filled(command) == words


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("claude -p {promt}", r"unknown placeholder {promt}; did you mean {prompt}\?"),
        ("x {PROMPT}", "unknown placeholder {PROMPT}"),
        ("x --dir={work_space}", r"did you mean {workspace}\?"),
        ("x {instruction}", "{{instruction}} passes {instruction} on as it is"),
        ("x 'open", "cannot be cut into words: No closing quotation"),
        ("  ", "is empty"),
    ],
)
def test_mistakes_are_told(command: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        filled(command)


@given(word=st.text(alphabet="{}$%@ab\"' promt_file.!:", max_size=20))
def test_what_is_checked_can_be_filled_and_the_rest_is_kept(word: str) -> None:
    try:
        check_words([word], VALUES, "command")
    except ConfigError:
        return
    (result,) = fill_words([word], VALUES)
    if not any(f"{{{name}}}" in word for name in VALUES) and "{{" not in word:
        assert result == word


def tasks(folder: Path, **fields: str) -> Path:
    (folder / "tasks" / "one").mkdir(parents=True)
    lines = {"prompt": "p", "evaluator": "{kind: command, command: 'true {workspace}'}", **fields}
    text = "".join(f"{name}: {value}\n" for name, value in lines.items())
    (folder / "tasks" / "one" / "task.yaml").write_text(text)
    return folder / "tasks"


@pytest.mark.parametrize(
    ("config", "task", "message"),
    [
        ({"command": "x {promt}"}, {}, r"^rollout\.harness\.command: unknown placeholder {promt}"),
        ({}, {"command": "'x {promt}'"}, r"one/task\.yaml: command: unknown placeholder {promt}"),
        ({}, {}, "task one names no command"),
        ({}, {"command": "''"}, "command is empty"),
        (
            {"command": "x", "container_prefix": ["docker", "-v", "{workspce}:/w"]},
            {},
            r"^rollout\.harness\.container_prefix: unknown placeholder {workspce}",
        ),
        (
            {"command": "x"},
            {"evaluator": "{kind: command, command: 'score {works}'}"},
            r"one/task\.yaml: evaluator\.command: unknown placeholder {works}",
        ),
        ({"command": "x", "kind": "comand"}, {}, "did you mean command"),
        ({"command": "x", "kind": "json:dumps"}, {}, "is not an async function"),
        ({"command": "x"}, {"evaluator": "{kind: pytst}"}, "did you mean pytest"),
        ({"command": "x"}, {"evaluator": "{kind: 'none.py:f'}"}, "no file .*none.py"),
        ({"command": "x"}, {"evaluator": "{kind: 'json:dumpz'}"}, "did you mean json:dump"),
        (
            {"command": "x"},
            {"evaluator": "{kind: 'json:detect_encoding'}"},
            r"cannot be called as \(workspace, task\)",
        ),
        (
            {"command": "x"},
            {"evaluator": "{kind: python, function: 'json:detect_encoding'}"},
            r"evaluator\.function: .*cannot be called",
        ),
        ({"command": "x"}, {"timeout_s": "-1"}, "timeout_s"),
        ({"command": "x"}, {"promt": "p"}, "promt"),
        ({"command": "x"}, {"evaluator": "[1"}, "task.yaml"),
    ],
)
def test_a_wrong_task_or_command_is_one_line_before_anything_starts(
    tmp_path: Path, config: dict, task: dict, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load_extensions(HarnessConfig(tasks=tasks(tmp_path, **task), **config))
    assert "\n" not in str(caught.value)


def test_a_broken_evaluator_file_is_one_line(tmp_path: Path) -> None:
    folder = tasks(tmp_path, evaluator="{kind: 'score.py:score'}", command="x")
    file = folder / "one" / "score.py"
    for text, said in (
        ("def score(workspace, task):\n    return (", "SyntaxError"),
        ("raise ValueError('two\\nlines')\n", "ValueError: two lines"),
        ("import no_such_module\n", "ModuleNotFoundError"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=said) as caught:
            load_extensions(HarnessConfig(tasks=folder))
        assert "\n" not in str(caught.value) and "task.yaml" in str(caught.value)
    file.write_text("def score(workspace, task):\n    return 1.0\n")
    assert list(load_extensions(HarnessConfig(tasks=folder)).tasks) == ["one"]


def test_two_tasks_of_one_name_are_refused(tmp_path: Path) -> None:
    folder = tasks(tmp_path, name="same", command="x")
    (folder / "two").mkdir()
    (folder / "two" / "task.yaml").write_text((folder / "one" / "task.yaml").read_text())
    with pytest.raises(ConfigError, match="2 tasks have the name 'same'"):
        load_extensions(HarnessConfig(tasks=folder))
