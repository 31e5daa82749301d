"""How a runtime says that it keeps a node in memory between two messages.

A runtime that keeps a node's process and `Context` alive sets
``context.__dict__[RESIDENT]``: to `PLAINTEXT` if messages travel without a certificate
of the server, else to True. The node's app may then leave its state in memory instead
of writing it into ``context.state`` at every message.
"""

RESIDENT = "flower_vfl_resident"
PLAINTEXT = "plaintext"
