//! Written by the libraries themselves: ISA-L 2.30 for the first two kinds, Jerasure 2.0 for the
//! third.

use placement::coding::Kind;

/// Parity rows, row by row, for some k and m.
pub const MATRICES: [(Kind, usize, usize, &[u8]); 6] = [
    (Kind::IsalVandermonde, 4, 3, &[1, 1, 1, 1, 1, 2, 4, 8, 1, 4, 16, 64]),
    (Kind::Cauchy, 4, 3, &[71, 167, 122, 186, 167, 71, 186, 122, 122, 186, 71, 167]),
    (Kind::JerasureVandermonde, 4, 3, &[1, 1, 1, 1, 1, 217, 92, 172, 1, 70, 143, 200]),
    (
        Kind::IsalVandermonde,
        10,
        4,
        &[
            1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 4, 8, 16, 32, 64, 128, 29, 58, 1, 4, 16, 64, 29,
            116, 205, 19, 76, 45, 1, 8, 64, 58, 205, 38, 45, 117, 143, 12,
        ],
    ),
    (
        Kind::Cauchy,
        10,
        4,
        &[
            221, 152, 173, 157, 93, 150, 61, 170, 142, 244, 152, 221, 157, 173, 150, 93, 170, 61,
            244, 142, 61, 170, 93, 150, 173, 157, 221, 152, 71, 167, 170, 61, 150, 93, 157, 173,
            152, 221, 167, 71,
        ],
    ),
    (
        Kind::JerasureVandermonde,
        10,
        4,
        &[
            1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 147, 138, 73, 93, 161, 103, 58, 99, 178, 1, 103, 156,
            151, 123, 187, 166, 175, 244, 83, 1, 220, 166, 123, 82, 143, 245, 40, 167, 122,
        ],
    ),
];

/// k, m, and the CRC32C of the parity chunks (see `digest`) for each kind in order.
pub const DIGESTS: [(usize, usize, [u32; 3]); 44] = [
    (2, 1, [0x3c366941, 0x04cd52cc, 0x3c366941]),
    (2, 2, [0x2174bf9d, 0xf1fbdeb1, 0x6aff3040]),
    (2, 3, [0x3ff9b152, 0x8e1c4118, 0xe5fbd103]),
    (2, 4, [0x2e5909bb, 0x43aab3e5, 0x2cbce230]),
    (3, 1, [0x7769be51, 0xdabf628e, 0x7769be51]),
    (3, 2, [0x0fef8b11, 0x97135332, 0x2ee56be3]),
    (3, 3, [0x1d8ce085, 0xe7d38708, 0x5bdc1334]),
    (3, 4, [0x247a8622, 0xd10d526a, 0xa1306ff7]),
    (4, 1, [0xb123ab54, 0xf209b186, 0xb123ab54]),
    (4, 2, [0x88887b85, 0x93e0455d, 0xf9e26914]),
    (4, 3, [0x3b579a74, 0x4e940cd6, 0x443c453f]),
    (4, 4, [0xe897edb4, 0xf46ff75f, 0xb484e556]),
    (5, 1, [0xea39e68b, 0xd44e6042, 0xea39e68b]),
    (5, 2, [0xa6a0550b, 0xa10cc43c, 0x0dbd266b]),
    (5, 3, [0xba12a9f9, 0xa45a2ed6, 0xfc0df51c]),
    (5, 4, [0x603db9fa, 0x51094ad0, 0x0512dbd0]),
    (6, 1, [0x21d81cb2, 0x844f8d83, 0x21d81cb2]),
    (6, 2, [0xc1484f3a, 0x1506caf6, 0x9009af96]),
    (6, 3, [0x06e5032c, 0x6a04a5b1, 0x28aa9ea0]),
    (6, 4, [0x0309961f, 0x333a32d6, 0x95a19b44]),
    (7, 1, [0x0f9a7f30, 0x9c55288b, 0x0f9a7f30]),
    (7, 2, [0xadf778ef, 0xb40dd8dc, 0x68b66f37]),
    (7, 3, [0xe98167e3, 0x61b33219, 0x7bd4e2c4]),
    (7, 4, [0x5001919b, 0x1b088fee, 0xe2bdeae4]),
    (8, 1, [0xf21b8cd0, 0x170151f2, 0xf21b8cd0]),
    (8, 2, [0x8e287cdf, 0xe61962a7, 0xb917ee0e]),
    (8, 3, [0xa91de395, 0x69efd54f, 0xc40e9559]),
    (8, 4, [0x1bcca9c9, 0xce7dd0c5, 0x76a2d5c5]),
    (9, 1, [0x424ed59f, 0x469dd798, 0x424ed59f]),
    (9, 2, [0x88792700, 0x1ec8e0cb, 0xc96e9e8d]),
    (9, 3, [0xcad9ca6d, 0x6bc0462d, 0x422bb772]),
    (9, 4, [0xd4a4dd28, 0x58757be4, 0x9a2a2174]),
    (10, 1, [0xe75defb4, 0xc78d86b1, 0xe75defb4]),
    (10, 2, [0xc265eacd, 0x34b0025b, 0x70411a7b]),
    (10, 3, [0x28d602c1, 0x3a62c2a9, 0xaeff54ae]),
    (10, 4, [0x87443cf4, 0xab5e1529, 0xf28799fe]),
    (11, 1, [0x4ef6be0f, 0xd46a81a3, 0x4ef6be0f]),
    (11, 2, [0xad9bec3d, 0xa667ee51, 0x77f83369]),
    (11, 3, [0xc1ed38a0, 0xda62e867, 0x0422333d]),
    (11, 4, [0x2756141f, 0xea8c4be8, 0x4deba97d]),
    (12, 1, [0x8a682885, 0x570b512d, 0x8a682885]),
    (12, 2, [0x3731baa5, 0x4cd83606, 0xeb8f1643]),
    (12, 3, [0x74d9dfd0, 0x1a8e00fb, 0xa6d11007]),
    (12, 4, [0x9fe32e74, 0x06242a2a, 0x6e4649ec]),
];
