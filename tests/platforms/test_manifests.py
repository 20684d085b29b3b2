"""Manifests of the recipes: schemas of the platforms, if these are installed, and further rules.

Commands of the manifests run with stand-ins that print their arguments, in the environment of the platform.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.platforms.jobs import RECIPES, Run

MANIFESTS = ("kubernetes/jobset.yaml", "kubernetes/trainjob.yaml", "skypilot/train.yaml", "hyperpod/train.yaml")
MODELS = {
    "JobSet": "JobsetV1alpha2JobSet",
    "TrainingRuntime": "TrainerV1alpha1TrainingRuntime",
    "TrainJob": "TrainerV1alpha1TrainJob",
    "PodTemplate": "IoK8sApiCoreV1PodTemplateSpec",
}


def read(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((RECIPES / name).read_text(encoding="utf-8")))


def find(node: Any, key: str) -> Iterator[Any]:
    if isinstance(node, dict):
        for name, value in node.items():
            if name == key:
                yield value
            yield from find(value, key)
    elif isinstance(node, list):
        for each in node:
            yield from find(each, key)


def check_model(kind: str, document: dict[str, Any]) -> None:
    """Check that the model drops no field as unknown and reads none differently."""
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="kubeflow-trainer-api: make test-platforms")
    known = getattr(models, MODELS[kind]).from_dict(document).to_dict()

    def select(document: Any, known: Any) -> Any:
        """Return the parts of ``known`` that the document has; the model adds defaults."""
        if isinstance(document, dict) and isinstance(known, dict):
            return {key: select(value, known.get(key)) for key, value in document.items()}
        if isinstance(document, list) and isinstance(known, list) and len(document) == len(known):
            return list(map(select, document, known))
        return known

    assert select(document, known) == document


def test_kubernetes_manifests_match_their_schemas() -> None:
    documents = [each for name in MANIFESTS[:2] for each in read(name)]
    assert [each["kind"] for each in documents] == ["JobSet", "TrainingRuntime", "TrainJob"]
    for each in documents:
        check_model(each["kind"], each)
    for each in find(read("hyperpod/train.yaml"), "template"):  # its pods are Kubernetes pods, the rest has no schema
        check_model("PodTemplate", each)
    documents[0]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["gracePeriod"] = 3
    with pytest.raises(AssertionError):  # an unknown field
        check_model("JobSet", documents[0])


def test_skypilots_task_matches_its_schema() -> None:
    sky = pytest.importorskip("sky", reason="skypilot: make test-platforms")
    task = sky.Task.from_yaml(str(RECIPES / "skypilot" / "train.yaml"))
    (resources,) = task.resources
    found = task.num_nodes, resources.use_spot, resources.accelerators, resources.job_recovery["max_restarts_on_errors"]
    assert found == (4, True, {"H100": 8}, 20)


@pytest.mark.parametrize("name", [name for name in MANIFESTS if "skypilot" not in name])
def test_pods_have_a_grace_period_and_memory_for_a_save(name: str) -> None:
    documents = read(name)
    (grace,) = find(documents, "terminationGracePeriodSeconds")
    arguments = [str(arg) for args in find(documents, "args") for arg in args]
    (patience,) = [int(arg.partition("=")[2]) for arg in arguments if arg.startswith("--shutdown-timeout=")]
    assert 30 < patience < grace
    assert all(command in (["torchrun"], ["hyperpodrun"]) for command in find(documents, "command"))  # no shell
    (volumes,) = find(documents, "volumes")
    (memory,) = [each["emptyDir"] for each in volumes if each["name"] == "memory"]
    (mounts,) = find(documents, "volumeMounts")
    assert {"name": "memory", "mountPath": "/dev/shm"} in mounts
    (limit,) = [each["memory"] for each in find(documents, "limits")]
    assert memory["medium"] == "Memory"
    assert int(memory["sizeLimit"].removesuffix("Gi")) < int(limit.removesuffix("Gi"))


@pytest.mark.parametrize("name", MANIFESTS[:2])
def test_the_failure_of_a_moved_pod_is_not_counted(name: str) -> None:
    documents = read(name)
    (policy,) = find(documents, "podFailurePolicy")
    assert list(find(documents, "restartPolicy")) == ["Never"]  # the API requires it for the policy
    assert list(find(documents, "backoffLimit")) == [0]  # a single restarted pod could not join the job
    assert all(rule["action"] == "FailJob" for rule in policy["rules"])
    codes = [code for each in find(policy, "onExitCodes") for code in each["values"]]
    assert codes == [143]
    named = {each["containerName"] for each in find(policy, "onExitCodes")}
    assert named == {each["name"] for containers in find(documents, "containers") for each in containers}
    assert [each["type"] for each in next(find(policy, "onPodConditions"))] == ["DisruptionTarget"]
    (rules,) = [rules["rules"] for rules in find(documents, "failurePolicy")]
    assert [(each["action"], each["onJobFailureReasons"]) for each in rules] == [
        ("RestartJobSetAndIgnoreMaxRestarts", ["PodFailurePolicy"])
    ]


def test_the_master_address_is_jobsets_name_of_the_first_pod() -> None:
    (jobset,) = read("kubernetes/jobset.yaml")
    (job,) = jobset["spec"]["replicatedJobs"]
    spec, name = job["template"]["spec"], jobset["metadata"]["name"]
    assert (job["replicas"], spec["completionMode"], spec["parallelism"]) == (1, "Indexed", spec["completions"])
    arguments = dict(arg[2:].split("=", 1) for args in find(spec, "args") for arg in args if arg.startswith("--r"))
    # <JobSet>-<replicated job>-<its number>-<pod>.<headless service, named after the JobSet>
    assert arguments["rdzv-endpoint"].partition(":")[0] == f"{name}-{job['name']}-0-0.{name}"


@pytest.mark.parametrize("rank", [0, 3])
def test_skypilots_variables_become_torchruns_arguments(rank: int, tmp_path: Path) -> None:
    (task,), run = read("skypilot/train.yaml"), Run(tmp_path)
    run.write_program("torchrun", 'printf "%s\\n" "$@"\necho "CHECKPOINTS=$CHECKPOINTS"')
    ips = "10.0.0.7\n10.0.0.8\n10.0.0.9\n10.0.0.10"
    variables = {"NUM_NODES": 4, "NODE_RANK": rank, "NODE_IPS": ips, "NUM_GPUS_PER_NODE": 8}
    variables |= {"TASK_ID": "sky-managed-1_train_7-0"}
    skypilot = {f"SKYPILOT_{name}": value for name, value in variables.items()}
    with run.start("bash", "-euc", task["run"], **task["envs"], **skypilot) as started:
        run.wait_for_end(started)
    lines = run.output.read_text().splitlines()
    options = dict(each[2:].split("=", 1) for each in lines if re.match("--.*=", each))
    expected = {"nnodes": "4", "node-rank": f"{rank}", "nproc-per-node": "8", "master-addr": "10.0.0.7"}
    assert {name: options[name] for name in expected} == expected
    assert lines[-1] == "CHECKPOINTS=s3://bucket/runs/sky-managed-1_train_7-0"


def test_hyperpods_number_of_replicas_is_within_its_bounds() -> None:
    (job,) = read("hyperpod/train.yaml")
    policy, (replicas,) = job["spec"]["elasticPolicy"], job["spec"]["replicaSpecs"]
    assert replicas["replicas"] in policy["replicaDiscreteValues"]
    assert replicas["maxReplicas"] == policy["maxReplicas"] == max(policy["replicaDiscreteValues"])
    assert policy["minReplicas"] == min(policy["replicaDiscreteValues"])
    (container,) = replicas["template"]["spec"]["containers"]
    assert f"--nproc-per-node={job['spec']['nprocPerNode']}" in container["args"]
