"""`torchrun ... -m trainer_node --endpoint tcp://... --node-id trainer --config FILE`."""

import os
import sys

from orchestrator.processes.parent import die_with_parent

if __name__ == "__main__":
    if "TORCHELASTIC_RUN_ID" in os.environ:
        # Without it, the ranks of a killed torchrun would keep their device memory.
        die_with_parent()
    from trainer_node.node import main

    sys.exit(main())
