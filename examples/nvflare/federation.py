"""A federation in NVIDIA FLARE with a tap, and a report about one of its rounds.

    pip install 'dosimeter[nvflare]'
    cd examples/nvflare && python federation.py --out ../../out/nvflare

Two clients train a small network on handwritten digits for two rounds in FLARE's simulator. Two filters make the tap: one sees the model
that
arrives at a client, the other what leaves it. The last step audits what one client sent in the first round.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from digits import LEARNING_RATE, DigitNet
from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe
from nvflare.recipe import SimEnv

import dosimeter as dm
from dosimeter.captures.store import captures_in, read_model
from dosimeter.integrations.nvflare import CaptureFilter


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/nvflare"))
    parser.add_argument("--audit", choices=("first", "none"), default="first", help="audit the first capture, or none")
    words = parser.parse_args()
    out = words.out.resolve()
    recipe = FedAvgRecipe(name="digits", min_clients=2, num_rounds=2, model=DigitNet(), train_script="client.py")
    folder, training = str(out / "captures" / "{client}"), {"name": "fedavg", "learning_rate": LEARNING_RATE}
    facts = {"input_shape": [1, 8, 8], "mode": "train"}
    recipe.add_client_input_filter(CaptureFilter(folder), tasks=["train"])
    recipe.add_client_output_filter(CaptureFilter(folder, training=training, facts=facts), tasks=["train"])
    recipe.execute(SimEnv(num_clients=2, workspace_root=str(out / "workspace")))
    if words.audit == "first":
        path = captures_in(out / "captures" / "site-1")[0]
        capture, model = dm.read_capture(path), DigitNet()
        model.load_state_dict(read_model(path, capture))
        report = dm.audit(exposure=capture.receive(model.train()), out=out / "report")
        print(report.save(out / "report"))


if __name__ == "__main__":
    main()
