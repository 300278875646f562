"""What can be wrong with a server of a pool."""


class ServerFault(Exception):
    """A server did not do what it was asked; it is left out until it holds the snapshot again."""


class ServerLost(ServerFault):
    """A server cannot be used; trying again does not help."""
