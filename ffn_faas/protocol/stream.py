"""The connection of one (A rank, F rank) pair on different hosts, byte by byte. Pure.

After the ticket was accepted (connectors.tcp), all numbers little endian:

    A -> F, a post:    u64 flag | i32 stage | i32 layer | i32 rows | i32 zero
                       | ids i32 [rows, top_k] | weights f32 [rows, top_k]
                       | hidden [rows, hidden_size] in the wire type
    F -> A, an answer: u64 flag | i32 stage | i32 rows | partial f32 [rows, hidden_size]

Flag, layer, rows, ids, weights, hidden and partial are those of the windows (protocol.window): a post is what lies in a
dispatch window when its flag is released, an answer what lies in a combine window. Stages share the connection; within
a stage posts and answers alternate, and an answer repeats the post's flag and rows. A post out of turn, of another
epoch, or above the capacity ends the session.
"""

from __future__ import annotations

import struct

POST = struct.Struct("<Qiiii")
"""flag, stage, layer, rows, 0."""
ANSWER = struct.Struct("<Qii")
"""flag, stage, rows."""
