"""Serves vLLM's own app with our guard and no engine, and prints its routes: `python -m support.vllm_app PORT`."""

from __future__ import annotations

import json
import os
import sys

os.environ |= {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True", "VLLM_SERVER_DEV_MODE": "1"}


def main(port: int) -> None:
    import uvicorn
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from lightning_proxy.serving.operator import GUARD

    options = ["--enable-scale-out", "--enable-lora", "--middleware", GUARD]
    app = build_app(make_arg_parser(FlexibleArgumentParser()).parse_args(options), ("generate",))
    print(json.dumps([route.path for route in app.routes]), flush=True)
    uvicorn.run(app, port=port, lifespan="off", log_level="critical")


if __name__ == "__main__":
    main(int(sys.argv[1]))
