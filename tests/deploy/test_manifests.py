"""The manifests for Kubernetes and Docker are well-formed, and agree with what the processes take."""

import os
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tokenbus.cli import main
from tokenbus.cli.console import config
from tokenbus.protocol.wire import subjects

DEPLOY = Path(__file__).parents[2] / "deploy"
FOREIGN = ("kustomize.config.k8s.io/v1beta1", "keda.sh/v1alpha1")
"""Kinds of others, whose schemas come with them and not with Kubernetes."""


def documents() -> Iterator[tuple[str, dict[str, Any]]]:
    for path in sorted((DEPLOY / "kubernetes").rglob("*.yaml")):
        if path.name != "nats-values.yaml":
            for document in yaml.safe_load_all(path.read_text()):
                yield f"{path.relative_to(DEPLOY)} {document.get('kind')}", document


MANIFESTS = [(name, document) for name, document in documents() if document["apiVersion"] not in FOREIGN]


@pytest.mark.parametrize("document", [document for _, document in MANIFESTS], ids=[name for name, _ in MANIFESTS])
def test_a_manifest_is_what_kubernetes_takes(document: dict[str, Any]) -> None:
    kubernetes_validate.validate(document, "1.32", strict=True)


def test_every_file_that_a_kustomization_names_is_there() -> None:
    for path in (DEPLOY / "kubernetes").rglob("kustomization.yaml"):
        for name in yaml.safe_load(path.read_text())["resources"]:
            assert (path.parent / name).exists(), f"{path} names {name}"


def test_the_settings_of_the_cluster_are_settings_that_processes_know(tmp_path: Path) -> None:
    (settings,) = [document for _, document in MANIFESTS if document["kind"] == "ConfigMap"]
    text = settings["data"]["tokenbus.toml"]
    path = tmp_path / "tokenbus.toml"
    path.write_text(text)
    _, commands = main.make_parser()
    for section in config.SECTIONS:
        config.apply(commands[section], section, config.read(path), str(path))
    assert set(tomllib.loads(text)) == {"nats", *config.SECTIONS}


def test_routers_answer_in_the_inboxes_that_the_gateway_of_the_cluster_asks_for() -> None:
    (document,) = [document for _, document in MANIFESTS if document["kind"] == "ConfigMap"]
    settings = tomllib.loads(document["data"]["tokenbus.toml"])
    prefixes, gateway = tuple(settings["router"]["inbox-prefix"]), settings["gateway"]
    assert subjects.is_inbox(f"{gateway['nats-inbox']}.x", prefixes, subjects.encode_name(gateway["tenant"]))
    assert subjects.is_inbox(gateway["tenant-inbox"].replace("{tenant}", "acme") + ".x", prefixes, "acme")


def test_containers_run_as_nobody_with_nothing_to_write_to() -> None:
    pods = [document["spec"]["template"]["spec"] for _, document in MANIFESTS if document["kind"] == "Deployment"]
    assert len(pods) == 3
    for pod in pods:
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["automountServiceAccountToken"] is False
        for container in pod["containers"]:
            assert container["securityContext"]["readOnlyRootFilesystem"]
            assert container["securityContext"]["capabilities"]["drop"] == ["ALL"]
            assert {"readinessProbe", "livenessProbe", "resources"} <= container.keys()


def test_probes_ask_where_no_client_is() -> None:
    pods = [document["spec"]["template"]["spec"] for _, document in MANIFESTS if document["kind"] == "Deployment"]
    for (container,) in (pod["containers"] for pod in pods):
        assert {container[probe]["httpGet"]["port"] for probe in ("readinessProbe", "livenessProbe")} == {"metrics"}
    (settings,) = [document for _, document in MANIFESTS if document["kind"] == "ConfigMap"]
    for name, section in tomllib.loads(settings["data"]["tokenbus.toml"]).items():
        assert name == "nats" or section["metrics-port"] == "9100", name


def test_a_pod_has_more_time_to_leave_than_its_streams_to_finish_and_to_be_taken() -> None:
    (document,) = [document for _, document in MANIFESTS if document["kind"] == "ConfigMap"]
    settings = tomllib.loads(document["data"]["tokenbus.toml"])["worker"]
    (worker,) = [
        document
        for _, document in MANIFESTS
        if document["kind"] == "Deployment" and document["metadata"]["name"] == "worker"
    ]
    needed_s = settings["grace-s"] + settings["handover-s"]
    assert worker["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] > needed_s


def default(text: str) -> str:
    """Returns what compose makes of a variable that is not set."""
    return text.partition(":-")[2].rstrip("}") if text.startswith("${") else text


def test_the_commands_of_the_compose_files_are_ones_that_processes_take() -> None:
    for file, nats in (("compose.yaml", "nats://nats:4222"), ("compose.host.yaml", "nats://127.0.0.1:4222")):
        services = yaml.safe_load((DEPLOY / file).read_text())["services"]
        for name in ("router", "worker", "gateway"):
            command = services[name]["command"]
            words = command if isinstance(command, list) else command.split()
            assert main.parse([default(word) for word in words]).nats == nats


def test_the_entrypoint_of_a_worker_in_compose_writes_its_grace_period_to_the_file_that_it_reads(
    tmp_path: Path,
) -> None:
    worker = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["worker"]
    tokenbus = tmp_path / "tokenbus"
    tokenbus.write_text('#!/bin/sh\necho "$@"; cat "$TOKENBUS_CONFIG"\n')
    tokenbus.chmod(0o755)
    variables = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "TOKENBUS_CONFIG": str(tmp_path / "worker.toml"),
        "GRACE_S": default(worker["environment"]["GRACE_S"]),
    }
    words = [word.replace("$$", "$") for word in worker["entrypoint"]] + ["worker", "--threads", "1"]
    said = subprocess.run(words, env=variables, capture_output=True, text=True, check=True).stdout
    assert said == "worker --threads 1\n[worker]\ngrace-s = 10\n"
    _, commands = main.make_parser()
    config.apply(commands["worker"], "worker", config.read(tmp_path / "worker.toml"), "worker.toml")
    assert commands["worker"].get_default("grace_s") == 10
