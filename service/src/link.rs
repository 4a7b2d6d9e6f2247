//! What nicfs and hostd say to each other over their private `SOCK_SEQPACKET` socket (nicfs
//! listens; only its own user may connect). One message a packet; the doorbell of a new client
//! travels beside Attach.
//!
//! ```text
//! kind u16, then                                                             direction
//!  1 Attach     token u64, pid u32, start u64, uid u32, gid u32, lanes u32, n u32, groups   hostd ->
//!  2 Gone       client u64                                                                  hostd ->
//!  3 ArenaQuery token u64, arena u32                                                        hostd ->
//!  4 CopiesDone id u64, n u32, bad u32 x n                                                  hostd ->
//!  5 Bell       client u64; its doorbell travels beside it                                  hostd ->
//! 16 Attached   token u64, client u64, segment u32                                          -> hostd
//! 17 Refused    token u64, errno u16, text                                                  -> hostd
//! 18 Arena      token u64, class u8 (0 none, 1 world, 2 group, 3 owner, 4 service), uid u32,
//!               gid u32, bytes u64                                                          -> hostd
//! 19 Copies     id u64, n u32, {zero u8, from segment u8 + number u32 + offset u64, to the same,
//!               length u64} x n                                                             -> hostd
//! 20 Detached   client u64                                                                  -> hostd
//! 21 Adopt      client u64, pid u32, start u64                                              -> hostd
//! ```

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use base::wire::{Corrupt, Reader, Writer};
use base::{ClientId, Errno, StreamSeq};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};
use storage::format::item::ReadClass;
use storage::media::Segment;
use storage::volume::{CopyItem, Summing};

use crate::core::event::COPIES_MAX;

/// Longest packet.
const PACKET_MAX: usize = 180 * 1024;
const NAME: &str = "message between nicfs and hostd";

/// A message; the module text has the fields.
#[derive(Clone, PartialEq, Eq, Debug)]
#[allow(missing_docs)]
pub enum Packet {
    Attach { token: u64, pid: u32, start: u64, uid: u32, gid: u32, lanes: u32, groups: Vec<u32> },
    Gone { client: ClientId },
    ArenaQuery { token: u64, arena: u32 },
    CopiesDone { id: u64, bad: Vec<u32> },
    Bell { client: ClientId },
    Attached { token: u64, client: ClientId, segment: u32 },
    Refused { token: u64, errno: Errno, text: String },
    Arena { token: u64, class: Option<ReadClass>, bytes: u64 },
    Copies { id: u64, items: Vec<CopyItem> },
    Detached { client: ClientId },
    Adopt { client: ClientId, pid: u32, start: u64 },
}

fn put_segment(w: &mut Writer<'_>, segment: Segment, offset: u64) {
    let (kind, number) = match segment {
        Segment::Super => (0, 0),
        Segment::Tree => (1, 0),
        Segment::Stream => (2, 0),
        Segment::Log(n) => (3, n),
        Segment::Arena(n) => (4, n),
        Segment::Clients => (5, 0),
    };
    w.u8(kind).u32(number).u64(offset);
}

fn take_segment(r: &mut Reader<'_>) -> Result<(Segment, u64), Corrupt> {
    let (kind, number, offset) = (r.u8()?, r.u32()?, r.u64()?);
    let segment = match kind {
        0 => Segment::Super,
        1 => Segment::Tree,
        2 => Segment::Stream,
        3 => Segment::Log(number),
        4 => Segment::Arena(number),
        5 => Segment::Clients,
        _ => return Err(r.corrupt("names an unknown segment")),
    };
    Ok((segment, offset))
}

impl Packet {
    /// The bytes of the packet.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        let mut w = Writer(&mut out);
        match self {
            Self::Attach { token, pid, start, uid, gid, lanes, groups } => {
                w.u16(1).u64(*token).u32(*pid).u64(*start).u32(*uid).u32(*gid).u32(*lanes);
                w.u32(groups.len() as u32);
                groups.iter().for_each(|g| {
                    w.u32(*g);
                });
            }
            Self::Gone { client } => {
                w.u16(2).u64(client.0);
            }
            Self::ArenaQuery { token, arena } => {
                w.u16(3).u64(*token).u32(*arena);
            }
            Self::CopiesDone { id, bad } => {
                w.u16(4).u64(*id).u32(bad.len() as u32);
                bad.iter().for_each(|b| {
                    w.u32(*b);
                });
            }
            Self::Bell { client } => {
                w.u16(5).u64(client.0);
            }
            Self::Attached { token, client, segment } => {
                w.u16(16).u64(*token).u64(client.0).u32(*segment);
            }
            Self::Refused { token, errno, text } => {
                w.u16(17).u64(*token).u16(errno.0).bytes(text.as_bytes());
            }
            Self::Arena { token, class, bytes } => {
                let (kind, uid, gid) = match class {
                    None => (0, 0, 0),
                    Some(ReadClass::World) => (1, 0, 0),
                    Some(ReadClass::Group { uid, gid }) => (2, *uid, *gid),
                    Some(ReadClass::Owner { uid }) => (3, *uid, 0),
                    Some(_) => (4, 0, 0),
                };
                w.u16(18).u64(*token).u8(kind).u32(uid).u32(gid).u64(*bytes);
            }
            Self::Copies { id, items } => {
                w.u16(19).u64(*id).u32(items.len() as u32);
                for item in items {
                    match *item {
                        CopyItem::Copy { from, to, len } => {
                            w.u8(0);
                            put_segment(&mut w, from.0, from.1);
                            put_segment(&mut w, to.0, to.1);
                            w.u64(len);
                        }
                        CopyItem::Zero { to, len } | CopyItem::Fresh { to, len } => {
                            w.u8(if matches!(item, CopyItem::Zero { .. }) { 1 } else { 2 });
                            put_segment(&mut w, to.0, to.1);
                            w.u64(len);
                        }
                        CopyItem::Summing(Summing { base, position, again }) => {
                            w.u8(3).u64(base).u64(position.0).u8(u8::from(again));
                        }
                    }
                }
            }
            Self::Detached { client } => {
                w.u16(20).u64(client.0);
            }
            Self::Adopt { client, pid, start } => {
                w.u16(21).u64(client.0).u32(*pid).u64(*start);
            }
        }
        out
    }

    /// Reads and checks a packet.
    pub fn decode(bytes: &[u8]) -> Result<Self, Corrupt> {
        let mut r = Reader::new(NAME, bytes);
        let packet = match r.u16()? {
            1 => {
                let (token, pid, start) = (r.u64()?, r.u32()?, r.u64()?);
                let (uid, gid, lanes, n) = (r.u32()?, r.u32()?, r.u32()?, r.u32()? as usize);
                if n > r.left() / 4 {
                    return Err(r.corrupt("claims more groups than it holds"));
                }
                let groups = (0..n).map(|_| r.u32()).collect::<Result<_, _>>()?;
                Self::Attach { token, pid, start, uid, gid, lanes, groups }
            }
            2 => Self::Gone { client: ClientId(r.u64()?) },
            3 => Self::ArenaQuery { token: r.u64()?, arena: r.u32()? },
            4 => {
                let (id, n) = (r.u64()?, r.u32()? as usize);
                if n > r.left() / 4 {
                    return Err(r.corrupt("claims more items than it holds"));
                }
                Self::CopiesDone { id, bad: (0..n).map(|_| r.u32()).collect::<Result<_, _>>()? }
            }
            5 => Self::Bell { client: ClientId(r.u64()?) },
            16 => Self::Attached { token: r.u64()?, client: ClientId(r.u64()?), segment: r.u32()? },
            17 => Self::Refused {
                token: r.u64()?,
                errno: Errno(r.u16()?),
                text: String::from_utf8_lossy(r.rest()).into_owned(),
            },
            18 => {
                let (token, kind, uid, gid) = (r.u64()?, r.u8()?, r.u32()?, r.u32()?);
                let class = match kind {
                    0 => None,
                    1 => Some(ReadClass::World),
                    2 => Some(ReadClass::Group { uid, gid }),
                    3 => Some(ReadClass::Owner { uid }),
                    4 => Some(ReadClass::Service),
                    _ => return Err(r.corrupt("names an unknown class")),
                };
                Self::Arena { token, class, bytes: r.u64()? }
            }
            19 => {
                let (id, n) = (r.u64()?, r.u32()? as usize);
                if n > COPIES_MAX {
                    return Err(r.corrupt("holds too many copies"));
                }
                let mut items = Vec::with_capacity(n);
                for _ in 0..n {
                    items.push(match r.u8()? {
                        0 => CopyItem::Copy {
                            from: take_segment(&mut r)?,
                            to: take_segment(&mut r)?,
                            len: r.u64()?,
                        },
                        1 => CopyItem::Zero { to: take_segment(&mut r)?, len: r.u64()? },
                        2 => CopyItem::Fresh { to: take_segment(&mut r)?, len: r.u64()? },
                        3 => CopyItem::Summing(Summing {
                            base: r.u64()?,
                            position: StreamSeq(r.u64()?),
                            again: r.flag()?,
                        }),
                        _ => return Err(r.corrupt("holds a copy of an unknown kind")),
                    });
                }
                Self::Copies { id, items }
            }
            20 => Self::Detached { client: ClientId(r.u64()?) },
            21 => Self::Adopt { client: ClientId(r.u64()?), pid: r.u32()?, start: r.u64()? },
            _ => return Err(r.corrupt("is of an unknown kind")),
        };
        r.end()?;
        Ok(packet)
    }
}

/// Sends a packet, with a descriptor if given.
pub fn send(
    socket: BorrowedFd<'_>,
    packet: &Packet,
    fd: Option<BorrowedFd<'_>>,
) -> std::io::Result<()> {
    let bytes = packet.encode();
    send_bytes(socket, &bytes, fd.as_slice())
}

/// Sends bytes and descriptors as one packet.
pub fn send_bytes(
    socket: BorrowedFd<'_>,
    bytes: &[u8],
    fds: &[BorrowedFd<'_>],
) -> std::io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        control.push(SendAncillaryMessage::ScmRights(fds));
    }
    rustix::io::retry_on_intr(|| {
        rustix::net::sendmsg(socket, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL)
    })?;
    Ok(())
}

/// Receives bytes and descriptors of one packet; 0 bytes when the peer has closed.
pub fn receive_bytes(
    socket: BorrowedFd<'_>,
    buffer: &mut [u8],
) -> std::io::Result<(usize, Vec<OwnedFd>)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
    let received = rustix::io::retry_on_intr(|| {
        rustix::net::recvmsg(socket, &mut [IoSliceMut::new(buffer)], &mut control, flags)
    })?;
    let mut fds = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fds.extend(rights);
        }
    }
    Ok((received.bytes, fds))
}

/// Receives one packet; `None` when there is none now.
pub fn receive(socket: &OwnedFd) -> std::io::Result<Option<(Packet, Vec<OwnedFd>)>> {
    let mut buffer = vec![0u8; PACKET_MAX];
    match receive_bytes(socket.as_fd(), &mut buffer) {
        Ok((0, _)) => Err(std::io::ErrorKind::UnexpectedEof.into()),
        Ok((n, fds)) => {
            let packet = Packet::decode(&buffer[..n]).map_err(std::io::Error::other)?;
            Ok(Some((packet, fds)))
        }
        Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => Ok(None),
        Err(e) => Err(e),
    }
}

/// Buffers large enough for a job of copies.
pub fn set_buffers(socket: BorrowedFd<'_>) {
    // Less than asked is granted without a word; then large jobs stay with nicfs.
    let _ = rustix::net::sockopt::set_socket_send_buffer_size(socket, 1 << 20);
    let _ = rustix::net::sockopt::set_socket_recv_buffer_size(socket, 1 << 20);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packets_survive_the_wire_and_damage_is_an_error() {
        let packets = [
            Packet::Attach {
                token: 1,
                pid: 2,
                start: 3,
                uid: 4,
                gid: 5,
                lanes: 6,
                groups: vec![7, 8],
            },
            Packet::Gone { client: ClientId(9) },
            Packet::Bell { client: ClientId(10) },
            Packet::CopiesDone { id: 1, bad: vec![3] },
            Packet::Refused { token: 1, errno: Errno::AGAIN, text: "no".into() },
            Packet::Arena { token: 1, class: Some(ReadClass::Group { uid: 1, gid: 2 }), bytes: 3 },
            Packet::Copies {
                id: 3,
                items: vec![
                    CopyItem::Copy {
                        from: (Segment::Stream, 4),
                        to: (Segment::Arena(5), 6),
                        len: 7,
                    },
                    CopyItem::Zero { to: (Segment::Arena(1), 2), len: 3 },
                    CopyItem::Fresh { to: (Segment::Arena(1), 4096), len: 4096 },
                    CopyItem::Summing(Summing {
                        base: 1 << 20,
                        position: StreamSeq(4),
                        again: true,
                    }),
                ],
            },
            Packet::Adopt { client: ClientId(1), pid: 2, start: 3 },
        ];
        for packet in packets {
            let bytes = packet.encode();
            assert_eq!(Packet::decode(&bytes), Ok(packet.clone()));
            for cut in 0..bytes.len() {
                // Free text may be cut without notice; everything else may not.
                let cut_short = Packet::decode(&bytes[..cut]);
                assert!(cut_short.is_err() || matches!(packet, Packet::Refused { .. }));
            }
        }
    }

    #[test]
    fn any_bytes_are_a_packet_or_an_error() {
        let mut random = base::random::Random::new(11);
        for _ in 0..20_000 {
            let mut bytes = vec![0; random.below(200) as usize];
            random.fill(&mut bytes);
            if let Some(kind) = bytes.first_mut() {
                *kind %= 24;
            }
            if let Some(high) = bytes.get_mut(1..12) {
                // Small numbers, so that counts are sometimes those of what follows.
                high.iter_mut().for_each(|b| *b &= 3);
            }
            if let Ok(packet) = Packet::decode(&bytes) {
                assert_eq!(Packet::decode(&packet.encode()), Ok(packet));
            }
        }
    }
}
