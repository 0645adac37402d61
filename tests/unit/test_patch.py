"""`deadpool patch`: put in, checked, taken out again; what does not fit is named and nothing is changed."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from deadpool_plugin import versions
from deadpool_plugin.cli import patch
from deadpool_plugin.cli.main import main
from deadpool_plugin.errors import EXIT_CONFIG

ROOT = Path(__file__).resolve().parents[2]
VERSIONS = {"core_v0.14.0": (0, 14, 0), "core_v0.15.3": (0, 15, 3), "core_v0.16.1": (0, 16, 1), "main": (0, 20, 0)}
STATEMENT = "import deadpool_plugin; deadpool_plugin.activate()"
FLAG = "--deadpool-config"


def patch_text(tag):
    return patch.Patch(tag, ROOT).file.read_text()


def files_of(tag):
    """Return the lines that the hunk of each file stands between, as many others before them as where it was made."""
    files = {}
    for name, at, body in re.findall(r"\+\+\+ b/(.*)\n@@ -(\d+).*\n((?:[ +-].*\n|\n)+?)(?=--- |\Z)", patch_text(tag)):
        before = [line[1:] for line in body.splitlines() if not line.startswith("+")]
        files[name] = [*(f"# line {number}" for number in range(int(at) - 1)), *before, "# the rest"]
    return files


def tree(folder, version, tag):
    """Write what the patch of `tag` needs of a checkout."""
    for name, lines in files_of(tag).items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("\n".join(lines) + "\n")
    info = folder / "megatron/core/package_info.py"
    info.parent.mkdir(parents=True, exist_ok=True)
    info.write_text("MAJOR = {}\nMINOR = {}\nPATCH = {}\n".format(*version))
    return folder


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def command(folder, *more):
    return main(["patch", "megatron-lm", str(folder), *more])


def test_every_tag_has_a_patch_and_every_hunk_says_why():
    assert set(patch.nearest_first((0, 14, 0))) == set(VERSIONS)
    for tag in VERSIONS:
        found = patch.Patch(tag, ROOT).hunks()
        assert [path for path, _ in found] == ["pretrain_gpt.py", "megatron/training/arguments.py"]
        assert all(len(why) > 20 for _, why in found)
        added = re.findall(r"^\+(?!\+\+ )(.*)$", patch_text(tag), re.MULTILINE)
        assert STATEMENT in added and len(added) <= 3


@pytest.mark.parametrize("tag", VERSIONS)
def test_a_checkout_gets_it_once_and_gives_it_back(tmp_path, capsys, tag):
    checkout = tree(tmp_path, VERSIONS[tag], tag)
    (checkout / "pretrain_gpt.py").chmod(0o755)
    before = contents(checkout)
    assert command(checkout, "--check") == 1 and contents(checkout) == before
    assert command(checkout) == 0
    assert STATEMENT in (checkout / "pretrain_gpt.py").read_text()
    assert FLAG in (checkout / "megatron/training/arguments.py").read_text()
    after = contents(checkout)
    assert command(checkout) == 0 and command(checkout, "--check") == 0 and contents(checkout) == after
    assert (checkout / "pretrain_gpt.py").stat().st_mode & 0o777 == 0o755
    assert command(checkout, "--revert") == 0 and contents(checkout) == before
    assert command(checkout, "--revert") == 0 and contents(checkout) == before
    assert f"the patch for {tag} fits" in capsys.readouterr().out


def test_changes_elsewhere_do_not_matter_and_stay(tmp_path):
    checkout = tree(tmp_path, VERSIONS["core_v0.16.1"], "core_v0.16.1")
    script = checkout / "pretrain_gpt.py"
    changed = "# our own licence\r\n\r\n" + script.read_text().replace("\n", "\r\n") + "our_own_code()\r\n"
    script.write_bytes(changed.encode())
    assert command(checkout) == 0
    assert f"{STATEMENT}\r\n".encode() in script.read_bytes() and b"our_own_code()\r\n" in script.read_bytes()
    assert command(checkout, "--revert") == 0 and script.read_bytes() == changed.encode()


def test_a_version_between_two_tags_gets_the_nearest_that_fits(tmp_path, capsys):
    assert command(tree(tmp_path, (0, 15, 1), "core_v0.15.3"), "--check") == 1
    assert "the patch for core_v0.15.3 fits" in capsys.readouterr().out
    assert patch.nearest_first((0, 21, 0))[:2] == ["main", "core_v0.16.1"]
    assert patch.nearest_first((0, 16, 0)) == ["core_v0.16.1", "core_v0.15.3", "core_v0.14.0", "main"]


def test_a_checkout_inside_a_repository_gets_it_too(tmp_path):
    """As a part of the user's own: git would pass over files above which it finds another repository."""
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    checkout = tree(tmp_path / "vendor", VERSIONS["main"], "main")
    assert command(checkout) == 0
    assert STATEMENT in (checkout / "pretrain_gpt.py").read_text()


def test_without_git_it_is_said_what_to_do(tmp_path, capsys, monkeypatch):
    checkout = tree(tmp_path, VERSIONS["main"], "main")
    before = contents(checkout)
    monkeypatch.setenv("PATH", "/nowhere")
    assert command(checkout) == EXIT_CONFIG and contents(checkout) == before
    said = capsys.readouterr().err
    assert "has no `git`" in said and f"by hand: {patch.Patch('main', checkout).file}" in said and said.count("\n") == 1


def test_a_hunk_that_does_not_fit_is_named_and_nothing_is_changed(tmp_path, capsys):
    checkout = tree(tmp_path, VERSIONS["core_v0.16.1"], "core_v0.16.1")
    arguments = checkout / "megatron/training/arguments.py"
    arguments.write_text(arguments.read_text().replace("Standard arguments", "Our arguments"))
    before = contents(checkout)
    assert command(checkout) == EXIT_CONFIG and contents(checkout) == before
    said = capsys.readouterr().err
    assert "megatron/training/arguments.py: the hunk made for line" in said and "does not fit" in said


def test_half_a_patch_is_said_to_be_one(tmp_path, capsys):
    checkout = tree(tmp_path, VERSIONS["core_v0.16.1"], "core_v0.16.1")
    untouched = (checkout / "megatron/training/arguments.py").read_text()
    assert command(checkout) == 0
    (checkout / "megatron/training/arguments.py").write_text(untouched)
    assert command(checkout) == EXIT_CONFIG
    assert "only part of the patch is in: pretrain_gpt.py" in capsys.readouterr().err


def test_what_is_no_checkout_is_refused(tmp_path, capsys):
    assert command(tmp_path) == EXIT_CONFIG
    assert "a checkout of NVIDIA/Megatron-LM" in capsys.readouterr().err


@pytest.mark.parametrize("tag", VERSIONS)
def test_the_real_files_of_each_tag_still_compile_with_it(tmp_path, tag):
    """MEGATRON_LM_GIT: a clone of NVIDIA/Megatron-LM with its tags, whose newest commit stands for main."""
    clone = os.environ.get("MEGATRON_LM_GIT", "")
    if not clone:
        pytest.skip("MEGATRON_LM_GIT is not set; expected the folder of a clone of NVIDIA/Megatron-LM with its tags")
    files = {path for path, _ in patch.Patch(tag, ROOT).hunks()} | {"megatron/core/package_info.py"}
    for name in files:
        source = f"{'HEAD' if tag == 'main' else tag}:{name}"
        shown = subprocess.run(["git", "-C", clone, "show", source], capture_output=True, check=True).stdout
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(shown)
    before = contents(tmp_path)
    assert command(tmp_path) == 0
    for name in files:
        compile((tmp_path / name).read_text(), name, "exec")
    script = (tmp_path / "pretrain_gpt.py").read_text()
    assert script.index(STATEMENT) < script.index("import ", script.index(STATEMENT) + len(STATEMENT))
    assert "import " not in script[: script.index(STATEMENT)]
    assert command(tmp_path, "--revert") == 0 and contents(tmp_path) == before


def test_a_patch_that_fits_is_not_taken_for_a_version_that_was_run(tmp_path, capsys, monkeypatch):
    row = versions.NEWEST
    monkeypatch.setattr(versions, "CHECKOUTS", (versions.Checkout("core_v0.16.1", row, held=True),))
    command(tree(tmp_path / "run", (0, 16, 1), "core_v0.16.1"), "--check")
    assert "of this version was put through losses" in capsys.readouterr().out
    command(tree(tmp_path / "not", (0, 15, 9), "core_v0.15.3"), "--check")
    assert "was not put through losses with this release; run: core_v0.16.1" in capsys.readouterr().out


def test_a_checkout_of_a_branch_was_run_only_at_the_commit_that_was(tmp_path, capsys, monkeypatch):
    checkout = tree(tmp_path, VERSIONS["main"], "main")
    git = ["git", "-C", str(checkout), "-c", "user.name=n", "-c", "user.email=e"]
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "first"]):
        subprocess.run([*git, *words], check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    main_ = versions.Checkout("main", versions.NEWEST, held=True, commit=commit)
    monkeypatch.setattr(versions, "CHECKOUTS", (main_,))
    command(checkout, "--check")
    assert "of this version was put through losses" in capsys.readouterr().out
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "later"], check=True)
    command(checkout, "--check")
    said = f"of this version was not put through losses with this release; run: main at {commit[:12]}"
    assert said in capsys.readouterr().out


def test_every_branch_that_held_names_the_commit_that_was_run():
    held = [one for one in versions.CHECKOUTS if one.held]
    assert {one.tag: bool(one.commit) for one in held} == {one.tag: not one.tag.startswith("core_v") for one in held}
