//! CRUSH maps from anywhere: binary and text. Whatever is read can be written and read again, and
//! mapping by it ends.

use placement::crush::{Map, Options, Placer, Workspace};

/// The target.
pub fn run(bytes: &[u8]) {
    let text = std::str::from_utf8(bytes).ok().and_then(|text| Map::compile(text).ok());
    for map in [Map::decode(bytes).ok(), text].into_iter().flatten() {
        assert_eq!(Map::decode(&map.encode()).as_ref(), Ok(&map));
        if let Ok(text) = map.decompile() {
            let _ = Map::compile(&text);
        }
        let options =
            Options { choose_args: Some(0), draws_max: Some(1 << 14), ..Options::default() };
        let Ok(placer) = Placer::new(&map, &options) else { continue };
        let reweights = vec![0x1_0000; placer.device_count().min(1 << 16)];
        let mut workspace = Workspace::new();
        for rule in 0..map.rules.len() as u32 {
            let _ = placer.place_many(rule, &[0, 1, u32::MAX], 3, &reweights, &mut workspace);
        }
    }
}
