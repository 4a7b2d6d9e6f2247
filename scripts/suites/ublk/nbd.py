#!/usr/bin/python3
"""The kernel's NBD client with sockets that may be exchanged, which nbd-client(8) cannot: over netlink (linux/nbd-netlink.h).

  nbd.py connect INDEX SOCKET EXPORT CONNECTIONS    /dev/nbdINDEX; when all connections are dead requests wait for a minute
  nbd.py again INDEX SOCKET EXPORT CONNECTIONS      new connections in place of dead ones: what waits goes on, and the size is the new one
  nbd.py disconnect INDEX
"""
import socket
import struct
import sys

CONNECT, DISCONNECT, RECONFIGURE = 1, 2, 3
INDEX, SIZE, BLOCK_SIZE, TIMEOUT, SERVER_FLAGS, CLIENT_FLAGS, SOCKETS, DEAD_TIMEOUT = range(1, 9)
ITEM = FD = 1


def exactly(sock, count):
    data = b""
    while len(data) < count:
        part = sock.recv(count - len(data))
        if not part:
            sys.exit("the server has ended the connection")
        data += part
    return data


def handshake(path, export):
    """Fixed newstyle, NBD_OPT_GO: a socket, the size, the flags."""
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(path)
    magic, option_magic, flags = struct.unpack(">QQH", exactly(sock, 18))
    if magic != 0x4E42444D41474943 or option_magic != 0x49484156454F5054:
        sys.exit("no NBD server")
    name = export.encode()
    data = struct.pack(">I", len(name)) + name + struct.pack(">H", 0)
    sock.sendall(struct.pack(">I", flags & 3) + struct.pack(">QII", option_magic, 7, len(data)) + data)
    size = None
    while True:
        _, _, kind, length = struct.unpack(">QIII", exactly(sock, 20))
        data = exactly(sock, length)
        if kind == 1:
            return sock, size, flags
        if kind != 3:
            sys.exit(f"the server refuses {export!r}: {kind:#x} {data!r}")
        if struct.unpack_from(">H", data)[0] == 0:
            _, size, flags = struct.unpack(">HQH", data)


def attribute(kind, data):
    return struct.pack("=HH", 4 + len(data), kind) + data + bytes(-len(data) % 4)


def u64(kind, number):
    return attribute(kind, struct.pack("=Q", number))


def call(link, family, command, attributes):
    """A message of generic netlink, and the answer's payload."""
    body = struct.pack("=BBH", command, 1, 0) + attributes
    link.send(struct.pack("=IHHII", 16 + len(body), family, 5, 1, 0) + body)
    answer = b""
    while True:
        data = link.recv(65536)
        while data:
            length, kind, _, _, _ = struct.unpack_from("=IHHII", data)
            if kind == 2:
                error = -struct.unpack_from("=i", data, 16)[0]
                if error:
                    sys.exit(f"the kernel refuses that: error {error}")
                return answer
            answer, data = data[20:length], data[(length + 3) & ~3 :]


def family(link):
    answer = call(link, 16, 3, attribute(2, b"nbd\0"))
    while answer:
        length, kind = struct.unpack_from("=HH", answer)
        if kind == 1:
            return struct.unpack_from("=H", answer, 4)[0]
        answer = answer[(length + 3) & ~3 :]
    sys.exit("the kernel knows no NBD")


def main(verb, index, path="", export="", connections="1"):
    link = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 16)
    link.bind((0, 0))
    nbd = family(link)
    index = attribute(INDEX, struct.pack("=I", int(index)))
    if verb == "disconnect":
        call(link, nbd, DISCONNECT, index)
        return
    opened = [handshake(path, export) for _ in range(int(connections))]
    size, flags = opened[0][1:]
    items = b"".join(attribute(0x8000 | ITEM, attribute(FD, struct.pack("=I", sock.fileno()))) for sock, _, _ in opened)
    sockets = attribute(0x8000 | SOCKETS, items)
    if verb == "connect":
        how = u64(BLOCK_SIZE, 512) + u64(SERVER_FLAGS, flags) + u64(TIMEOUT, 60) + u64(DEAD_TIMEOUT, 60)
        call(link, nbd, CONNECT, index + u64(SIZE, size) + how + sockets)
    else:
        call(link, nbd, RECONFIGURE, index + u64(SIZE, size) + sockets)
    print(size)


main(*sys.argv[1:])
