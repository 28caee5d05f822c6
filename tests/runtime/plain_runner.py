"""Runs the sampler model in whatever onnxruntime is on the path, with nothing of ours imported.

    python -P plain_runner.py MODEL LIBRARY {custom,plain,provider} FEEDS.npz OUTPUTS.npz

Writes the outputs by name, and prints as JSON: the version, the output dims, the operator types that ran with their
provider, and what a wrong shape was refused with.
"""

import json
import sys

import numpy as np
import onnxruntime as ort

PROVIDER = "TileFuseExecutionProvider"


def main(model: str, library: str, mode: str, feeds_path: str, outputs_path: str) -> None:
    ort.set_default_logger_severity(4)
    options = ort.SessionOptions()
    options.enable_profiling = True
    options.profile_file_prefix = outputs_path
    if mode == "custom":
        options.register_custom_ops_library(library)
    if mode == "provider":
        ort.register_execution_provider_library("tilefuse", library)
        options.add_provider_for_devices([d for d in ort.get_ep_devices() if d.ep_name == PROVIDER], {})
        session = ort.InferenceSession(model, options)
    else:
        session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    feeds = dict(np.load(feeds_path))
    names = ["mean", "rest", "fourfold", "triple"]
    mean, rest, fourfold, triple = (np.asarray(output) for output in session.run(names, feeds))
    np.savez(outputs_path, mean=mean, rest=rest, fourfold=fourfold, triple=triple)
    refusal = ""
    try:
        session.run(names, {**feeds, "s": feeds["s"][:2]})
    except Exception as error:  # noqa: BLE001 - the class differs between versions; its text is what is reported
        refusal = str(error)
    with open(session.end_profiling()) as profile:
        events = [event["args"] for event in json.load(profile) if event["cat"] == "Node"]
    report = {
        "version": ort.__version__,
        "dims": {output.name: output.shape for output in session.get_outputs()},
        "ran": sorted({f"{event['op_name']}@{event['provider']}" for event in events if "provider" in event}),
        "refusal": refusal,
        "ours": sorted({"tilecore", "runtime", "fuser", "tilefuse"} & set(sys.modules)),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
