"""Jobs of several threads become one array. What Slurm makes of it: tests/integration/test_slurm.py."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pipeline.cluster.launchers import LAUNCHERS, slurm
from pipeline.cluster.launchers.job_folder import JobFolder
from pipeline.cluster.launchers.slurm import FOLDERS, Arrays, Job, array_script, script
from pipeline.cluster.launchers.slurm_job import RefusedError
from pipeline.core.specs import Cluster, Host


class Sbatch:
    """In place of Slurm's commands: keeps what it is given."""

    def __init__(self, refuses: str = "", most: int = 99) -> None:
        self.texts: list[str] = []
        self.outputs: list[str] = []
        self.refuses, self.most = refuses, most

    def submit(self, text: str, *, folder: str, output: str, environ: Mapping[str, str]) -> str:
        if (self.refuses and "--array" in text) or len(self.texts) == self.most:
            raise RefusedError(self.refuses)
        self.texts.append(text)
        self.outputs.append(output)
        return str(len(self.texts))


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm, "_QUIET_S", 0.2)


def job(runs: Path, key: str, nnodes: int = 1) -> Job:
    """With the folder that it shares with the controller."""
    folder = runs / key / FOLDERS / f"of-{key}"
    JobFolder(folder, "job.sh").make("", {}, nnodes)
    hosts = (Host(name="granted", python="python3"),) * nnodes
    settings = LAUNCHERS.settings("slurm")(nnodes=nnodes)
    return Job(f"paceline-{key}", str(folder), Cluster(launcher="slurm", hosts=hosts, settings=settings))


def submitted(
    queue: Sbatch, jobs: list[Job], side_by_side: int, environs: list[dict[str, str]] | None = None
) -> list[str]:
    arrays = Arrays(queue)  # type: ignore[arg-type]
    with ThreadPoolExecutor(len(jobs)) as pool:
        return list(pool.map(arrays.submit, jobs, environs or [{}] * len(jobs), [side_by_side] * len(jobs)))


def test_jobs_that_are_submitted_together_are_one_array_whose_elements_print_into_their_own_folders(
    tmp_path: Path,
) -> None:
    queue, jobs = Sbatch(), [job(tmp_path, key) for key in ("a", "b", "it's c")]
    ids = submitted(queue, jobs, 3)
    assert sorted(ids) == ["1_0", "1_1", "1_2"]
    (text,) = queue.texts
    assert "#SBATCH --array=0-2\n" in text
    for id_, one in zip(ids, jobs, strict=True):
        number = id_.partition("_")[2]
        output = Path(queue.outputs[0].replace("%a", number))
        assert output.resolve() == Path(one.folder) / "out"
        name, _, at = (Path(one.folder) / "array").read_text().partition(" ")
        assert f"#SBATCH --job-name={name}\n" in text
        assert at == number


def test_jobs_that_are_not_alike_or_have_other_secrets_are_no_array(tmp_path: Path) -> None:
    queue, jobs = Sbatch(), [job(tmp_path, "a"), job(tmp_path, "b", nnodes=2), job(tmp_path, "c")]
    ids = submitted(queue, jobs, 3, environs=[{}, {}, {"SECRETS": "x"}])
    assert sorted(ids) == ["1", "2", "3"]
    assert not any("--array" in text for text in queue.texts)


def test_where_nothing_runs_beside_it_a_job_is_submitted_as_it_is(tmp_path: Path) -> None:
    queue, one = Sbatch(), job(tmp_path, "a%b")
    assert submitted(queue, [one], 1) == ["1"]
    assert queue.texts == [script(one)]
    assert queue.outputs == [f"{one.folder}/out".replace("%", "%%")]


def test_where_the_site_allows_no_array_each_job_is_submitted_alone(tmp_path: Path) -> None:
    queue, jobs = (
        Sbatch("Slurm refused the job: Invalid job array specification"),
        [job(tmp_path, "a"), job(tmp_path, "b")],
    )
    assert sorted(submitted(queue, jobs, 2)) == ["1", "2"]
    assert not list(tmp_path.glob("*/slurm/*/array"))


def test_where_a_site_allows_fewer_jobs_than_there_are_trials_those_are_submitted_and_the_others_told(
    tmp_path: Path,
) -> None:
    queue = Sbatch("Slurm refused the job: Job violates accounting/QOS policy", most=2)
    arrays, jobs = Arrays(queue), [job(tmp_path, key) for key in "abc"]  # type: ignore[arg-type]
    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(arrays.submit, one, {}, 3) for one in jobs]
    errors = [str(one.exception()) for one in waiting if one.exception()]
    assert errors == ["Slurm refused the job: Job violates accounting/QOS policy"]


def test_what_leads_to_outputs_of_removed_runs_is_removed(tmp_path: Path) -> None:
    queue = Sbatch()
    submitted(queue, [job(tmp_path, "a"), job(tmp_path, "b")], 2)
    for path in [*tmp_path.glob("[ab]/slurm/*/*")]:
        path.unlink()
    (tmp_path / ".paceline" / "arrays" / ".nfs0001").touch()
    submitted(queue, [job(tmp_path, "c"), job(tmp_path, "d")], 2)
    (left,) = (tmp_path / ".paceline" / "arrays").glob("*/")
    assert left == Path(queue.outputs[-1]).parent


def test_an_element_of_an_array_takes_the_folder_of_its_number(tmp_path: Path) -> None:
    text = array_script([job(tmp_path, "a"), job(tmp_path, "it's b")], "paceline-array-1")
    assert "1) folder='" in text
    assert text.index("esac") < text.index('cd "$folder/../.."') < text.index("exec srun")
    assert text.rstrip().endswith('< "$folder/request"')
