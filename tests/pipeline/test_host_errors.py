"""What a host's own words become: ssh is blamed for what ssh has said, a login for what a login has said."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest

from pipeline.cluster.agent import wire
from pipeline.cluster.agent.files import folders
from pipeline.cluster.launchers.pssh import output_of, remote_command
from pipeline.cluster.launchers.transport.answers import Answer, Output, explain_over_ssh
from pipeline.core.specs import Host

GPU1 = Host(name="gpu1")


def told(error: str) -> tuple[str, str | None]:
    """Of what the agent itself has answered."""
    return explain_over_ssh(GPU1, Answer(value={"error": error}), None, connect_s=20.0)


def without_answer(
    stdout: str = "", stderr: str = "", *, code: int | None, note: str = "", host: Host = GPU1, is_setting: bool = True
) -> tuple[str, str | None]:
    output = Output(stdout=stdout.encode(), stderr=stderr, code=code, note=note)
    return explain_over_ssh(host, Answer(value=None, output=output), None, connect_s=20.0, is_setting=is_setting)


def test_a_folder_that_the_login_cannot_write_is_no_matter_of_keys() -> None:
    failure = wire.reason(PermissionError(13, "Permission denied", "/root/x"))
    why, hint = told(failure)
    assert why == failure
    assert why.startswith("can't write there ([Errno 13] Permission denied: '/root/x')")
    assert hint == "cluster.workdir=/path/to/a/folder/there"


def test_a_workdir_that_cannot_be_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (tmp_path / "file").open("rb") as stream, pytest.raises(SystemExit) as ended:
        folders.unpack(stream, str(tmp_path / "file" / "runs" / "node0"))
    why, hint = told(wire.reason(ended.value))
    assert why == f"can't make the folder {tmp_path}/file/runs there (Not a directory); set cluster.workdir"
    assert hint == "cluster.workdir=/path/to/a/folder/there"


def find_python(python: str | None, path: str) -> tuple[str, str | None]:
    """What becomes of what the remote command says there."""
    words = shlex.split(remote_command(python))[1:]
    program = words if python else [*words[:-2], "/opt/none/python", words[-1]]
    done = subprocess.run(program, env={"PATH": path}, capture_output=True, text=True, check=False)
    return without_answer(done.stdout, done.stderr, code=done.returncode, host=Host(name="gpu1", python=python))


def test_a_login_without_a_useful_path_is_told_with_the_path_and_where_it_is_set() -> None:
    why, hint = find_python(None, "/nowhere")
    controllers = "cluster.python=null (this controller's interpreter, else python3)"
    assert why == f"no such interpreter there: {controllers}; its login has PATH=/nowhere"
    assert hint == (
        "cluster.python=/path/to/python, or install Python there (ssh gpu1 ls /usr/bin/python3), or fix PATH in the "
        "start files of its login shell (~/.bashrc, ~/.profile, ~/.zshenv)"
    )


def test_an_interpreter_that_is_a_folder_or_not_executable_is_no_matter_of_keys(tmp_path: Path) -> None:
    file, broken = tmp_path / "python", tmp_path / "broken"
    file.touch()
    broken.write_text("#!/opt/none\n")
    broken.chmod(0o755)
    for path, seen in ((tmp_path, "is a folder"), (file, "is not executable")):
        why, hint = find_python(str(path), "/bin")
        assert why == f"no such interpreter there: cluster.python='{path}'; {path} {seen}; its login has PATH=/bin"
        assert hint is not None
        assert hint.startswith("cluster.python=/path/to/python")
    why, _ = find_python(str(broken), "/bin")
    assert why.startswith(f"its interpreter can't be run: cluster.python='{broken}': {broken}: ")


def test_a_python_that_is_too_old_is_named_with_its_version() -> None:
    why, hint = without_answer(stderr="/usr/bin/python3: Python 3.6.8 is too old for the node agent\n", code=1)
    assert why == "/usr/bin/python3 is Python 3.6.8; the node agent needs 3.9, training 3.11"
    assert hint == "cluster.python=/path/to/python"


def test_only_sshs_own_refusal_is_a_matter_of_keys() -> None:
    refusal = "me@10.0.0.7: Permission denied (publickey,password).\r\n"
    why, hint = without_answer(stderr=f"Banner: Permission denied to strangers\n{refusal}", code=255)
    assert why == (
        "Permission denied (publickey,password): no key of your agent or ~/.ssh (IdentityFile) is accepted there"
    )
    assert hint == "ssh-copy-id gpu1, or ssh-add the right key"
    for said, code in ((refusal, 1), ("bash: /etc/profile.d/x.sh: Permission denied\n", 255)):
        why, hint = without_answer(stderr=said, code=code)
        assert why.startswith(f"its login ended with exit code {code} and no answer of the node agent; it said:\n")
        assert "ssh-copy-id" not in str(hint)


def test_what_a_host_says_instead_of_an_answer_is_shown_without_secrets_and_control_characters() -> None:
    host = Host(name="gpu1", secrets={"API_TOKEN": "hunter2222"})
    lines = [f"line {number}" for number in range(9)] + ["\x1b[31mred\x07", "key hunter2222", "x" * 300, ""]
    why, hint = without_answer("\n".join(lines), "bye https://me:pw@host/\n", code=0, host=host)
    assert why.splitlines() == [
        "its login ended with exit code 0 and no answer of the node agent: an `exit` in a start file, or a "
        "ForceCommand in its sshd_config; it said:",
        "      line 8",
        "      \\x1b[31mred\\x07",
        "      key ***",
        f"      {'x' * 200}…",
        "      bye https://***@host/",
    ]
    assert hint is not None
    assert hint.startswith("ssh gpu1 echo ok, which must print ok; see the start files")


@pytest.mark.parametrize(
    ("stdout", "stderr", "code", "meaning", "mends"),
    [
        ("paceline: a shell took its standard input for commands\n", "", 97, "puts another shell",
         "[[ $- == *i* ]] &&"),
        ("", "paceline: no program came on standard input\n", 1, "reads standard input", "[[ $- == *i* ]]"),
    ],
)  # fmt: skip
def test_what_is_known_of_a_login_is_said_with_what_it_printed(
    stdout: str, stderr: str, code: int, meaning: str, mends: str
) -> None:
    why, hint = without_answer(stdout, stderr, code=code)
    assert meaning in why
    assert why.endswith(f"; it said:\n      {(stdout or stderr).strip()}")
    assert mends in str(hint)


def test_a_start_file_that_ends_the_login_by_exec_is_no_matter_of_the_interpreter() -> None:
    why, hint = without_answer(
        "\n\necho paceline: a shell took its standard input for commands; exit 97\n8\x9c", code=0
    )
    assert why.endswith("prints what it reads (`exec cat`)"), "the compressed agent isn't quoted"
    assert "~/.bashrc" in str(hint)
    why, _ = without_answer("", "/root/.bashrc: line 3: exec: zsh: not found\n", code=127)
    assert why.startswith("its login ended with exit code 127 and no answer")
    why, _ = without_answer("", "sh: 1: exec: /opt/python: Permission denied\n", code=126)
    assert why.startswith("its interpreter can't be run")


def test_a_host_that_is_slow_is_told_with_the_setting_and_one_that_refuses_without() -> None:
    late = "ssh: connect to host gpu1 port 22: Connection timed out\n"
    assert without_answer(stderr=late, code=255) == (
        "unreachable: it hadn't answered after 20 s (cluster.connect_timeout_s): Connection timed out",
        "cluster.connect_timeout_s=60 if it is only slow, or ssh gpu1 true",
    )
    note = "it hadn't answered after 28 s"
    why, hint = without_answer("Loading modules\n", code=None, note=note)
    assert why == f"{note} (cluster.connect_timeout_s=20 and some for the answer); it said:\n      Loading modules"
    assert hint == "cluster.connect_timeout_s=60 if it is only slow, or ssh gpu1 true"
    assert "connect_timeout_s" not in str(without_answer(code=None, note=note, is_setting=False))
    refused = "ssh: connect to host gpu1 port 22: Connection refused\n"
    assert without_answer(stderr=refused, code=255) == ("unreachable: Connection refused", "ssh gpu1 true")


@pytest.mark.parametrize(
    ("report", "code", "note"),
    [
        ("[1] 07:00:01 [SUCCESS] me@gpu1:22", 0, ""),
        ("[1] 07:00:01 [FAILURE] me@gpu1:22 [Errno 32] Broken pipe, Exited with error code 97", 97, ""),
        ("[1] 07:00:01 [FAILURE] me@gpu1:22 Killed by signal 15", -15, ""),
        ("[1] 07:00:01 [FAILURE] me@gpu1:22 Timed out, Killed by signal 9", None, "it hadn't answered after 28 s"),
        ("[1] 07:00:01 [FAILURE] me@gpu1:222 Timed out", None, "pssh has not asked it"),
    ],
)
def test_how_pssh_tells_that_a_command_has_ended(tmp_path: Path, report: str, code: int | None, note: str) -> None:
    (tmp_path / "err").mkdir()
    (tmp_path / "err" / "me@gpu1:22").write_bytes(b"oh \xff\n")
    assert output_of(tmp_path, "me@gpu1:22", report, 28.0) == Output(stderr="oh \ufffd\n", code=code, note=note)
