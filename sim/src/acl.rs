//! Access control lists as the judges know them (acl(5)), with code of their own. Each has a mask. Those of clients by
//! hand have the owner, user 7, the group, a mask and the others, of which the last three have the same rights.

fn put(list: &mut Vec<u8>, tag: u16, rights: u16, id: u32) {
    list.extend_from_slice(&tag.to_le_bytes());
    list.extend_from_slice(&rights.to_le_bytes());
    list.extend_from_slice(&id.to_le_bytes());
}

/// A list: of the owner, of users, of the group, of groups, the mask, and of the others.
pub fn full(rights: [u16; 4], users: &[(u32, u16)], groups: &[(u32, u16)]) -> Vec<u8> {
    let [owner, group, mask, others] = rights;
    let mut value = 2u32.to_le_bytes().to_vec();
    put(&mut value, 1, owner, u32::MAX);
    users.iter().for_each(|(id, rights)| put(&mut value, 2, *rights, *id));
    put(&mut value, 4, group, u32::MAX);
    groups.iter().for_each(|(id, rights)| put(&mut value, 8, *rights, *id));
    put(&mut value, 16, mask, u32::MAX);
    put(&mut value, 32, others, u32::MAX);
    value
}

/// The attribute's value.
pub fn list(owner: u16, user: u16, others: u16) -> Vec<u8> {
    let mut value = 2u32.to_le_bytes().to_vec();
    put(&mut value, 1, owner, u32::MAX);
    put(&mut value, 2, user, 7);
    for tag in [4, 16, 32] {
        put(&mut value, tag, others, u32::MAX);
    }
    value
}

/// The permission bits that go with it.
pub fn mode(owner: u16, others: u16) -> u32 {
    let others = u32::from(others);
    u32::from(owner) << 6 | others << 3 | others
}

/// What something new that is made with `mode` makes of its directory's default list; and its permission bits.
pub fn narrow(list: &mut [u8], mode: u32) -> u32 {
    let mut bits = 0;
    for entry in list[4..].chunks_exact_mut(8) {
        let shift = match u16::from_le_bytes([entry[0], entry[1]]) {
            1 => 6,
            16 => 3,
            32 => 0,
            _ => continue,
        };
        entry[2] &= (mode >> shift & 7) as u8;
        bits |= u32::from(entry[2]) << shift;
    }
    bits
}

/// What chmod makes of it.
pub fn chmod(list: &mut [u8], mode: u32) {
    for entry in list[4..].chunks_exact_mut(8) {
        let rights = match u16::from_le_bytes([entry[0], entry[1]]) {
            1 => mode >> 6,
            16 => mode >> 3,
            32 => mode,
            _ => continue,
        };
        entry[2] = (rights & 7) as u8;
    }
}

/// The permission bits of a list.
pub fn mode_of(list: &[u8]) -> u32 {
    let mut bits = 0;
    for entry in list[4..].chunks_exact(8) {
        let shift = match u16::from_le_bytes([entry[0], entry[1]]) {
            1 => 6,
            16 => 3,
            32 => 0,
            _ => continue,
        };
        bits |= u32::from(entry[2] & 7) << shift;
    }
    bits
}
