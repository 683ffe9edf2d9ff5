"""A gateway that sends heartbeats to a socket as fast as possible, as a process."""

import sys

import zmq

from shared.wire.codec import encode
from shared.wire.messages import PROTOCOL_MAJOR, Heartbeat, Hello, State

path, instance = sys.argv[1:]
socket = zmq.Context().socket(zmq.DEALER)
socket.connect(f"ipc://{path}")
socket.send_multipart(encode(Hello(PROTOCOL_MAJOR, 0, "gateway", instance)))
heartbeat = encode(Heartbeat(State.READY, "", 0, 0))
while True:
    socket.send_multipart(heartbeat)
