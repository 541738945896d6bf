"""`torchrun ... -m trainer_node --endpoint tcp://... --node-id trainer --config FILE`."""

import sys

from trainer_node.node import main

if __name__ == "__main__":
    sys.exit(main())
