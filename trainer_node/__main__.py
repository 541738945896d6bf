"""`torchrun ... -m trainer_node --endpoint tcp://... --node-id trainer --config FILE`."""

import os
import sys

from orchestrator.protocol.parent import die_with_parent

if __name__ == "__main__":
    if "TORCHELASTIC_RUN_ID" in os.environ:
        # A killed torchrun's ranks would go on, with their device memory, beside those of the next one.
        die_with_parent()
    from trainer_node.node import main

    sys.exit(main())
