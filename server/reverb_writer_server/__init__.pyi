# The public names of this package, once: type checkers read them here, and so does `reverb_writer.lazy`.

from reverb_writer_server.reverb.replay_server import ReplayServer as ReplayServer
from reverb_writer_server.reverb.sockets import PortInUseError as PortInUseError

__version__: str
