//! What people write: configuration, options of a mount, sizes, uuids; and the files that are
//! looked at because a program uses them: libraries and the table of their system calls.

use corbel_input::config::Config;
use corbel_input::failure::Failure;
use corbel_input::{objects, sites, units};
use frontend::mount_options::MountOptions;

fn explained<T>(result: Result<T, Failure>) -> Option<T> {
    result
        .map_err(|failure| {
            assert!(!failure.message.is_empty() && !failure.remedy.is_empty(), "{failure:?}");
        })
        .ok()
}

fn config(text: &str) {
    let Some(config) = explained(Config::parse("file", text)) else { return };
    let again = Config::parse("file", &config.render()).expect("what it writes it reads");
    assert_eq!(again, config);
    let _ = explained(config.check("file"));
}

fn numbers(text: &str) {
    if let Ok(bytes) = units::parse_bytes(text) {
        assert_eq!(units::parse_bytes(&units::show_bytes(bytes)), Ok(bytes));
    }
    if let Ok(duration) = units::parse_duration(text) {
        assert_eq!(units::parse_duration(&units::show_duration(duration)), Ok(duration));
    }
    assert!(units::parse_mode(text).is_ok_and(|m| m <= 0o7777) || units::parse_mode(text).is_err());
    let _ = units::parse_uuid(text);
    let _ = corbel_input::format::parse_env(text.as_bytes());
}

fn options(text: &str) {
    let mut options = MountOptions::default();
    if let Err(error) = options.apply(text) {
        assert!(!error.is_empty());
    }
    assert!(options.threads > 0);
}

/// What is found in a program lies in it, one behind the other, and is what it is said to be.
fn calls(bytes: &[u8]) {
    let Some(found) = objects::scan_bytes(bytes.to_vec()) else { return };
    let mut end = 0;
    for call in &found.calls {
        let (at, len) = (call.at as usize, usize::from(call.len));
        let window = &bytes[at..at + len];
        assert!(at >= end && (5..=24).contains(&len));
        assert_eq!(window[usize::from(call.syscall)..][..2], [0x0f, 0x05]);
        assert_eq!(base::crc32c(0, window), call.check);
        end = at + len;
    }
    assert_eq!(objects::decode(&objects::encode(&found)), Some(found));
}

/// The target: the first byte says what the rest is.
pub fn run(bytes: &[u8]) {
    let Some((&which, rest)) = bytes.split_first() else { return };
    let text = String::from_utf8_lossy(rest);
    match which % 8 {
        0 => config(&text),
        1 => numbers(&text),
        2 => options(&text),
        3 => {
            if let Some(found) = sites::decode(rest) {
                assert_eq!(sites::encode(&found), rest);
            }
        }
        4 => {
            let Some(mut file) = rest.get(16..).map(<[u8]>::to_vec) else { return };
            let crc = base::crc32c(0, &file);
            let mut sealed = rest[..12].to_vec();
            sealed.extend_from_slice(&crc.to_le_bytes());
            sealed.append(&mut file);
            if let Some(found) = sites::decode(&sealed) {
                assert_eq!(sites::encode(&found), sealed);
            }
        }
        6 => {
            let Some(mut file) = rest.get(16..).map(<[u8]>::to_vec) else { return };
            let crc = base::crc32c(0, &file);
            let mut sealed = rest[..12].to_vec();
            sealed.extend_from_slice(&crc.to_le_bytes());
            sealed.append(&mut file);
            if let Some(found) = objects::decode(&sealed) {
                assert_eq!(objects::encode(&found), sealed);
            }
        }
        7 => calls(rest),
        _ => {
            let _ = explained(sites::scan_bytes(std::path::Path::new("library"), rest.to_vec()));
        }
    }
}

/// A library as small as can be: one segment with a build-id, one section of code.
fn library() -> Vec<u8> {
    let mut elf = vec![0; 64];
    elf[..6].copy_from_slice(b"\x7fELF\x02\x01");
    elf[18] = 62;
    (elf[32], elf[56]) = (64, 2);
    let (headers, code_at, note_at) = (64 + 2 * 56 + 64, 240 + 64u64, 240u64);
    let segment = |kind: u32, offset: u64, address: u64, size: u64| {
        let mut bytes = vec![0; 56];
        bytes[..4].copy_from_slice(&kind.to_le_bytes());
        bytes[8..16].copy_from_slice(&offset.to_le_bytes());
        bytes[16..24].copy_from_slice(&address.to_le_bytes());
        bytes[32..40].copy_from_slice(&size.to_le_bytes());
        bytes
    };
    elf.extend(segment(4, note_at, 0, 64));
    elf.extend(segment(1, 0, 0, 4096));
    (elf[40], elf[60]) = (64 + 2 * 56, 1);
    let mut section = vec![0; 64];
    (section[4], section[8]) = (1, 4);
    section[16..24].copy_from_slice(&code_at.to_le_bytes());
    section[24..32].copy_from_slice(&code_at.to_le_bytes());
    // mov eax, 1; syscall; cmp rax, -4096; lea rdi, [rip]; syscall; nop; nop; nop; ret
    let code =
        b"\xb8\x01\0\0\0\x0f\x05\x48\x3d\0\xf0\xff\xff\x48\x8d\x3d\0\0\0\0\x0f\x05\x90\x90\x90\xc3";
    section[32] = code.len() as u8;
    elf.extend(section);
    assert_eq!(elf.len(), headers);
    let mut note = vec![4, 0, 0, 0, 20, 0, 0, 0, 3, 0, 0, 0];
    note.extend_from_slice(b"GNU\0");
    note.extend_from_slice(&[0xab; 20]);
    note.resize(64, 0);
    elf.extend(note);
    elf.extend_from_slice(code);
    elf
}

/// A program as small as can be: a function with a frame, and a table of constants that looks like code.
fn program() -> Vec<u8> {
    const CODE: usize = 0x200;
    const HEADER: usize = 0x280;
    const FRAMES: usize = 0x290;
    let mut elf = vec![0; 64];
    elf[..6].copy_from_slice(b"\x7fELF\x02\x01");
    (elf[18], elf[32], elf[56]) = (62, 64, 2);
    for (kind, flags, address, size) in [(1u32, 5u32, 0u64, 1024u64), (0x6474_e550, 4, 0x280, 128)]
    {
        elf.extend([kind.to_le_bytes(), flags.to_le_bytes()].concat());
        for word in [address, address, 0, size] {
            elf.extend(word.to_le_bytes());
        }
        elf.resize(elf.len() + 16, 0);
    }
    elf.resize(CODE, 0);
    // mov ebx, 1; mov eax, ebx; syscall; test eax, eax; je to the syscall; mov eax, 425; syscall; ret
    elf.extend(b"\xbb\x01\0\0\0\x89\xd8\x0f\x05\x85\xc0\x74\xfa\xb8\xa9\x01\0\0\x0f\x05\xc3");
    let end = elf.len();
    elf.extend(b"\x90\x90\x0f\x05\x90\x90\x90\x48\x31\xc0\x0f\x05\x90\x90\x90");
    elf.resize(HEADER, 0);
    elf.extend([1, 0x1b, 0xff, 0xff]);
    elf.extend((FRAMES as i32 - elf.len() as i32).to_le_bytes());
    elf.resize(FRAMES, 0);
    let common = b"\0\0\0\0\x01zR\0\x01\x78\x10\x01\x1b\0\0\0";
    elf.extend((common.len() as u32).to_le_bytes());
    elf.extend(common);
    elf.extend(16u32.to_le_bytes());
    elf.extend(((elf.len() - FRAMES) as u32).to_le_bytes());
    elf.extend((CODE as i32 - elf.len() as i32).to_le_bytes());
    elf.extend(((end - CODE) as u32).to_le_bytes());
    elf.resize(1024, 0);
    elf
}

/// Inputs to begin with.
pub fn seeds() -> Vec<Vec<u8>> {
    let texts: [(u8, &str); 8] = [
        (0, "[node]\nid = 2\nregion = \"/r\"\ncapacity = \"64MiB\"\n[log]\nlanes = 3\n"),
        (0, "[cluster]\nreplicas = 3\nfailure_timeout = \"500ms\"\n"),
        (1, "64 MiB"),
        (1, "1_500 us"),
        (1, "0123456789abcdef-0123-456789abcdef"),
        (1, "3,-1"),
        (2, "ro,nosuid,allow_other,threads=4"),
        (2, "local_locks,no_default_permissions,_netdev"),
    ];
    let mut all: Vec<Vec<u8>> =
        texts.iter().map(|(which, text)| [&[*which], text.as_bytes()].concat()).collect();
    let library = library();
    let found = sites::scan_bytes(std::path::Path::new("library"), library.clone());
    let table = sites::encode(&found.expect("a library").sites);
    all.push([&[3], &table[..]].concat());
    all.push([&[4], &table[..]].concat());
    all.push([&[5], &library[..]].concat());
    let program = program();
    let found = objects::scan_bytes(program.clone()).expect("a program");
    // The first cannot be moved, since something jumps there; the table is left alone.
    let places: Vec<_> = found.calls.iter().map(|c| (c.at, c.len, c.number)).collect();
    assert_eq!((places, found.unseen), (vec![(0x20d, 7, 425)], true));
    all.push([&[6], &objects::encode(&found)[..]].concat());
    all.push([&[7], &program[..]].concat());
    all.push([&[7], &library[..]].concat());
    all
}
