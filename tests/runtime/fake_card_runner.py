"""Calls a library's op for the CUDA provider with a driver that runs nothing, and prints what that was asked for.

    fake_card_runner.py FAKE LIBRARY CALL      CALL is JSON: see `main`

FAKE is csrc/fake_cuda.c as a shared library, or "none": then there is no driver.
"""

import ctypes
import json
import sys
from itertools import count
from pathlib import Path

from played_runtime import PROVIDER, PlayedRuntime, RefusedError, Value

OUTPUTS, SCRATCH, STEP = 0x2000000, 0x3000000, 0x100000  # made-up addresses: nothing is read or written


def main(fake: str, library: str, call_text: str) -> None:
    call = json.loads(call_text)
    driver = None if fake == "none" else ctypes.CDLL(fake, mode=ctypes.RTLD_GLOBAL)
    for name, value in call.get("driver", {}).items():
        assert driver is not None
        ctypes.c_int.in_dll(driver, name).value = value
    if driver is not None:
        (ctypes.c_char * 256).in_dll(driver, "fake_arguments").value = call.get("arguments", "").encode()
    numbers = count()
    host = PlayedRuntime(
        Path(library), stream=call.get("stream", 0xC5), scratch=lambda size: SCRATCH + STEP * next(numbers)
    )
    said = ""
    try:
        ((name, op),) = host.names(PROVIDER).items()
        kernel = host.create(op)
        inputs = [Value(address, kind, tuple(shape)) for address, kind, shape in call["inputs"]]
        for _ in range(call.get("times", 1)):
            host.run(op, kernel, inputs, lambda index, shape: Value(OUTPUTS + STEP * index, 10, shape))
    except RefusedError as error:
        said = str(error)
    log = [] if driver is None else (ctypes.c_char * (1 << 16)).in_dll(driver, "fake_log").value.decode().splitlines()
    found = {"log": log, "refused": said, "allocated": host.allocated, "freed": host.freed}
    names = {"cpu": sorted(host.names(None)), "cuda": sorted(host.names(PROVIDER))}
    print(json.dumps(found | names))


if __name__ == "__main__":
    main(*sys.argv[1:])
