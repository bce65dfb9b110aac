"""Containers as data: each engine's command, what Slurm gets, the digest in the key, and what is refused."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.cluster.agent.host import container
from pipeline.cluster.launchers import settings
from pipeline.cluster.launchers.slurm import SlurmConfig, script
from pipeline.cluster.preflight.versions import common_versions, refuse_different
from pipeline.config.cluster import build_cluster
from pipeline.config.compose import compose_config, resolve
from pipeline.core.errors import HostError, UsageError
from pipeline.core.specs import Cluster, Host, LaunchSettings
from pipeline.keys import IMAGE
from tests.pipeline.test_plan import facts
from trainers.contract.host_facts import Container

LOGIN = container.Login(1000, 100, {"nofile": "1024:4096", "memlock": "-1:-1"}, has_infiniband=True)
MOUNTS = {"/data/pack": False, '/runs/a, "b"': True}
DIGEST = f"sha256:{'ab' * 32}"


def command(engine: str, **change: Any) -> list[str]:
    planned = Container(f"/usr/bin/{engine}", DIGEST, DIGEST, gpus=True, name="paceline-1")
    login = LOGIN._replace(**change)
    return container.command(planned, ["python3", "-m", "x y"], cwd="/runs", mounts=MOUNTS, login=login)


def test_podman_and_docker_share_the_hosts_network_memory_and_process_ids_and_are_told_nothing_secret() -> None:
    shared = [
        *("--rm", "--interactive", "--name", "paceline-1", "--network=host", "--ipc=host", "--pid=host"),
        *("--log-driver=none", "--security-opt=label=disable", "--user=1000:100"),
        *("--ulimit=nofile=1024:4096", "--ulimit=memlock=-1:-1"),
    ]
    rest = [
        "--device=/dev/infiniband",
        "--mount=type=bind,source=/data/pack,destination=/data/pack,ro",
        '--mount=type=bind,"source=/runs/a, ""b""","destination=/runs/a, ""b"""',
        *("--workdir=/runs", "--entrypoint=python3", DIGEST, "-m", "x y"),
    ]
    podman = ["--userns=keep-id", "--device=nvidia.com/gpu=all"]
    assert command("podman") == ["/usr/bin/podman", "run", *shared, *podman, *rest]
    assert command("docker") == ["/usr/bin/docker", "run", *shared, "--gpus=all", *rest]
    as_root = command("podman", uid=0, has_infiniband=False)
    assert "--userns=keep-id" not in as_root
    assert "--device=/dev/infiniband" not in as_root


def test_apptainer_gets_folders_gpus_and_nothing_of_the_shell() -> None:
    assert command("apptainer") == [
        *("/usr/bin/apptainer", "exec", "--nv", "--no-home", "--cleanenv"),
        *("--mount", "type=bind,source=/data/pack,destination=/data/pack,ro"),
        *("--mount", 'type=bind,"source=/runs/a, ""b""","destination=/runs/a, ""b"""'),
        *("--pwd", "/runs", DIGEST, "python3", "-m", "x y"),
    ]


def slurm(image: str, **change: Any) -> Cluster:
    hosts = (Host(name="granted0"),)
    settings = SlurmConfig(container=image)
    return replace(Cluster(launcher="slurm", hosts=hosts, container=image, settings=settings), **change)


def test_on_slurm_the_agent_itself_starts_in_the_image() -> None:
    cluster = slurm("/shared/torch.sif", device="cuda", container_mounts=("/datasets",))
    text = script(cluster, "paceline-x", "/shared/runs/x/slurm/1", ("/shared/runs",))
    into = "apptainer exec --nv --no-home --bind /shared/runs,/datasets /shared/torch.sif python3 -E -c"
    assert f"--kill-on-bad-exit=1 {into} " in text
    cluster = slurm("/shared/torch.sqsh", container_mounts=("/datasets",))
    text = script(cluster, "paceline-x", "/shared/runs/x/slurm/1", ("/shared/runs",))
    pyxis = (
        "--container-image=/shared/torch.sqsh --container-mounts=/shared/runs:/shared/runs,/datasets:/datasets "
        "--no-container-mount-home python3 -E -c"
    )
    assert f"--kill-on-bad-exit=1 {pyxis} " in text
    with pytest.raises(UsageError, match="/a,b can't be seen there"):
        settings.srun_in_container(cluster, ["/a,b"])


def test_a_files_digest_is_remembered_until_it_changes(tmp_path: Path) -> None:
    image = tmp_path / "torch.sif"
    image.write_bytes(b"one")
    digest = f"sha256:{hashlib.sha256(b'one').hexdigest()}"
    assert container.file_digest(str(image), str(tmp_path)) == digest
    (memory,) = (tmp_path / "images").iterdir()
    memory.write_text('"remembered"')
    assert container.file_digest(str(image), str(tmp_path)) == "remembered"
    image.write_bytes(b"others")
    assert container.file_digest(str(image), str(tmp_path)) != "remembered"
    assert settings.image_digest_here(slurm(str(image))) == f"sha256:{hashlib.sha256(b'others').hexdigest()}"
    with pytest.raises(SystemExit, match=r"has no image /no\.sif .*: No such file or directory; there: ls -l /no\.sif"):
        container.file_digest("/no.sif", str(tmp_path))
    with pytest.raises(UsageError, match=r"can't be read here: [^$]*try: put the image on a file system that this"):
        settings.image_digest_here(slurm("/no.sif"))


def test_the_digest_of_a_pods_image_counts_if_its_name_holds_one() -> None:
    def known(image: str) -> str | None:
        return settings.image_digest_here(Cluster(launcher="kubernetes", hosts=(), settings=_Pods(image=image)))

    assert known(f"registry/torch@{DIGEST}") == DIGEST
    assert known("registry/torch:2.9") is None


@dataclass(kw_only=True)
class _Pods(LaunchSettings):
    image: str


def test_hosts_with_other_images_are_refused_with_the_command_that_brings_one() -> None:
    images = [Container("podman", "torch", f"sha256:{number}", gpus=False) for number in range(2)]
    here, other = (facts(number, container=image) for number, image in enumerate(images))
    assert common_versions([here, here], {IMAGE: ""}) == {IMAGE: "sha256:0"}
    bring = r"copy one image to every host \(podman save IMAGE \| ssh HOST podman load"
    with pytest.raises(HostError, match=rf"node1: container image sha256:1 \(node0 has sha256:0\)[^$]*try: {bring}"):
        common_versions([here, other], {IMAGE: ""})
    refuse_different([here], {IMAGE: "sha256:0"}, {})
    with pytest.raises(
        HostError, match=r"node1: container image sha256:1 \(the key says sha256:0\)[^$]*the same command"
    ):
        refuse_different([here, other], {IMAGE: "sha256:0"}, {})


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("cluster.container='a b'",), "'a b' is no name of an image"),
        (("cluster.container=torch.sif",), "torch.sif is a file, and needs its absolute path on the hosts"),
        (("cluster.container=/x.sqsh",), "pyxis, which starts such an image, is a part of Slurm"),
        (("cluster.container_mounts=[/a]",), "container_mounts is for cluster.container=IMAGE, which isn't set"),
        (("cluster.container=x", "cluster.container_mounts=[a]"), "'a' must be an absolute path on the hosts"),
        (("cluster.container=x", "cluster.environment=hosts"), "take out cluster.environment"),
        (
            ("cluster=pssh", "cluster.hosts=[a]", "cluster.container=x", "cluster.environment_from=lock"),
            "take out cluster.environment_from",
        ),
        (("cluster=slurm", "cluster.container=torch"), "try: apptainer pull torch.sif docker://torch, then"),
    ],
)
def test_what_no_engine_could_take_is_refused_before_a_host_is_asked(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        build_cluster(resolve(compose_config(words))["cluster"], root=Path("/"), local_gpus=0)
    assert message in str(caught.value)


def test_a_pods_image_is_another_setting() -> None:
    words = ("cluster=kubernetes", "cluster.image=x", "cluster.pvc=x", "cluster.mount_path=/x", "cluster.container=y")
    with pytest.raises(
        UsageError, match=r"pods are containers already; their image is cluster\.image[^$]*image=y, with"
    ):
        build_cluster(resolve(compose_config(words))["cluster"], root=Path("/"), local_gpus=0)


def test_without_engine_image_or_folder_a_host_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        SystemExit, match=r"has no podman and no docker for cluster\.container=torch:1; there: sudo apt-get"
    ):
        container.find_image("torch:1", str(tmp_path), gpus=False, mounts=())
    with pytest.raises(SystemExit, match=r"has no apptainer and no singularity for cluster\.container=/x\.sif"):
        container.find_image("/x.sif", str(tmp_path), gpus=False, mounts=())
    (tmp_path / "podman").write_text("#!/bin/sh\necho 'Error: torch:1: image not known' >&2\nexit 125\n")
    (tmp_path / "podman").chmod(0o755)
    said = r"has no image torch:1 .*; podman says: Error: torch:1: image not known; there: podman pull torch:1"
    with pytest.raises(SystemExit, match=said):
        container.find_image("torch:1", str(tmp_path), gpus=False, mounts=())
    with pytest.raises(SystemExit, match=r"; here: podman save localhost/torch \| ssh HOST podman load"):
        container.find_image("localhost/torch", str(tmp_path), gpus=False, mounts=())
    found = Container(f"{tmp_path}/podman", "torch:1", DIGEST, gpus=False)
    with pytest.raises(
        SystemExit, match=r"has no /no/folder, which the ranks' container is to see; cluster\.container_mounts"
    ):
        container.software_in(found._replace(mounts=("/no/folder",)), "torch:1", [], [])
    with pytest.raises(
        SystemExit, match="can't run the python3 of torch:1 by podman: exit code 125: Error: torch:1: image"
    ):
        container.software_in(found, "torch:1", [], [])
