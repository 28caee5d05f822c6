"""The files under deploy/ against the schemas of those who read them, against each other, and against the server."""

import configparser
import json
import re
import shlex
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from runtime.server.option_table import OPTIONS, build_options
from runtime.server.serve import ServerOptions

ROOT = Path(__file__).resolve().parents[2]
KSERVE = ROOT / "deploy" / "kserve"
CRD: Any = json.loads(Path(__file__).with_name("kserve_crd.json").read_text(encoding="utf-8"))["schemas"]


def closed(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


TEXT, COUNT = {"type": "string"}, {"type": "integer", "minimum": 1}
SCALING = closed(
    {
        "stabilizationWindowSeconds": {"type": "integer", "minimum": 0, "maximum": 3600},
        "selectPolicy": {"enum": ["Max", "Min", "Disabled"]},
        "policies": {
            "type": "array",
            "items": closed(
                {
                    "type": {"enum": ["Pods", "Percent"]},
                    "value": COUNT,
                    "periodSeconds": {"type": "integer", "minimum": 1, "maximum": 1800},
                },
                "type",
                "value",
                "periodSeconds",
            ),
        },
    }
)
# Written from the reference of the Kubernetes API, autoscaling/v2, for metrics of type Resource.
AUTOSCALER = closed(
    {
        "apiVersion": {"const": "autoscaling/v2"},
        "kind": {"const": "HorizontalPodAutoscaler"},
        "metadata": closed({"name": TEXT}, "name"),
        "spec": closed(
            {
                "scaleTargetRef": closed({"apiVersion": TEXT, "kind": TEXT, "name": TEXT}, "kind", "name"),
                "minReplicas": COUNT,
                "maxReplicas": COUNT,
                "metrics": {
                    "type": "array",
                    "items": closed(
                        {
                            "type": {"const": "Resource"},
                            "resource": closed(
                                {
                                    "name": {"enum": ["cpu", "memory"]},
                                    "target": closed(
                                        {"type": {"const": "Utilization"}, "averageUtilization": COUNT},
                                        "type",
                                        "averageUtilization",
                                    ),
                                },
                                "name",
                                "target",
                            ),
                        },
                        "type",
                        "resource",
                    ),
                },
                "behavior": closed({"scaleUp": SCALING, "scaleDown": SCALING}),
            },
            "scaleTargetRef",
            "maxReplicas",
        ),
    },
    "apiVersion",
    "kind",
    "metadata",
    "spec",
)
SCHEMAS = {
    "servingruntime.yaml": CRD["ServingRuntime"],
    "inferenceservice.yaml": CRD["InferenceService"],
    "hpa.yaml": AUTOSCALER,
}


def read(name: str) -> Any:
    return yaml.safe_load((KSERVE / name).read_text(encoding="utf-8"))


def options_of(arguments: list[str]) -> ServerOptions:
    """What the server makes of the flags behind `tilefuse serve REPOSITORY`."""
    kinds = {option.name: option.kind for option in OPTIONS}
    given: dict[str, Any] = {}
    for name, value in zip(*(iter(" ".join(arguments).replace("=", " ").split()),) * 2, strict=True):
        key = name.removeprefix("--").replace("-", "_")
        assert name.startswith("--"), name
        assert key in kinds, name
        given[key] = kinds[key](value)
    return build_options(given)


@pytest.mark.parametrize("name", list(SCHEMAS))
def test_the_manifests_fit_their_schemas(name: str) -> None:
    jsonschema.validate(read(name), SCHEMAS[name])


@pytest.mark.parametrize(
    ("name", "path", "value"),
    [
        ("servingruntime.yaml", ("spec", "containers", 0, "readinessProbe", "grpc", "port"), "h2c"),
        ("servingruntime.yaml", ("spec", "containers", 0, "readinesProbe"), {}),
        ("servingruntime.yaml", ("spec", "supportedModelFormats", 0, "priority"), 0),
        ("servingruntime.yaml", ("spec", "protocolVersions"), "grpc-v2"),
        ("inferenceservice.yaml", ("spec", "predictor", "minReplicas"), "1"),
        ("inferenceservice.yaml", ("spec", "predictor", "model", "protocol"), "grpc-v2"),
        ("inferenceservice.yaml", ("spec", "predictor", "scaleMetric"), "gpu"),
        ("inferenceservice.yaml", ("apiVersion",), "serving.kserve.io/v1alpha1"),
        ("hpa.yaml", ("spec", "maxReplicas"), 0),
    ],
)
def test_the_schemas_refuse_mistakes(name: str, path: tuple[Any, ...], value: Any) -> None:
    manifest = read(name)
    inner = manifest
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(manifest, SCHEMAS[name])


def test_probes_ports_and_times_agree_with_the_server() -> None:
    [container] = read("servingruntime.yaml")["spec"]["containers"]
    repository, *flags = container["args"]
    assert repository == "/mnt/models"
    options = options_of(flags)
    [port] = container["ports"]
    assert (port["name"], port["containerPort"]) == ("h2c", options.transport.port)
    for probe in ("startupProbe", "readinessProbe"):
        assert container[probe]["grpc"]["port"] == options.transport.port
    assert container["livenessProbe"]["tcpSocket"]["port"] == options.transport.port
    annotations = read("servingruntime.yaml")["spec"]["annotations"]
    assert annotations["prometheus.kserve.io/port"] == str(options.status_port)
    pause = int(re.findall(r"sleep\((\d+)\)", container["lifecycle"]["preStop"]["exec"]["command"][-1])[0])
    predictor = read("inferenceservice.yaml")["spec"]["predictor"]
    assert pause + options.drain_seconds < predictor["terminationGracePeriodSeconds"]


def test_the_manifests_name_each_other() -> None:
    runtime, service, autoscaler = map(read, SCHEMAS)
    predictor = service["spec"]["predictor"]
    assert predictor["model"]["runtime"] == runtime["metadata"]["name"]
    assert predictor["model"]["protocolVersion"] in runtime["spec"]["protocolVersions"]
    assert predictor["model"]["modelFormat"]["name"] in {
        entry["name"] for entry in runtime["spec"]["supportedModelFormats"]
    }
    assert autoscaler["spec"]["scaleTargetRef"]["name"] == f"{service['metadata']['name']}-predictor"
    for limit in ("minReplicas", "maxReplicas"):
        assert autoscaler["spec"][limit] == predictor[limit]


def test_the_container_runs_the_server_without_rights() -> None:
    text = (KSERVE / "Containerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line.partition(" ") for line in text.splitlines() if line and not line.startswith("#")]
    assert [key for key, _, _ in lines].count("FROM") == 2
    last = {key: value for key, _, value in lines}  # of each instruction, the last: that of the second stage
    [container] = read("servingruntime.yaml")["spec"]["containers"]
    user = container["securityContext"]["runAsUser"]
    assert last["USER"] == f"{user}:{user}"
    assert f"--uid {user} " in last["RUN"]
    assert json.loads(last["ENTRYPOINT"]) == ["tilefuse", "serve"]
    _, *flags = json.loads(last["CMD"])
    options = options_of(flags)
    assert last["EXPOSE"].split() == [str(options.transport.port), str(options.status_port)]
    assert f"127.0.0.1:{options.status_port}/ready" in last["HEALTHCHECK"]
    for source in re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.MULTILINE):
        for name in source.split():
            assert (ROOT / name).exists(), name


def test_the_unit_gives_the_server_time_to_drain() -> None:
    unit = configparser.ConfigParser(interpolation=None, strict=True)
    unit.optionxform = str  # pyright: ignore[reportAttributeAccessIssue] - keys are case-sensitive
    unit.read(ROOT / "deploy" / "systemd" / "tilefuse.service", encoding="utf-8")
    service = unit["Service"]
    command = shlex.split(service["ExecStart"])
    assert command[1:3] == ["serve", "/srv/tilefuse/models"]
    assert command[3] == "--config"
    assert int(service["TimeoutStopSec"]) > ServerOptions().drain_seconds
    assert service["KillSignal"] == "SIGTERM"
    assert service["DynamicUser"] == "yes"
    assert service["CacheDirectory"] in service["Environment"]
