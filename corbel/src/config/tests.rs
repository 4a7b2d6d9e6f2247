use proptest::prelude::*;

use super::*;

const DOCUMENTED: &str = include_str!("../../config/corbel.toml");

/// The documented file is what the program writes, and means the defaults.
#[test]
fn documented_file_is_the_defaults() {
    let parsed = Config::parse("config/corbel.toml", DOCUMENTED).unwrap();
    assert_eq!(parsed, Config::default());
    parsed.check("config/corbel.toml").unwrap();
    assert_eq!(DOCUMENTED, Config::default().render());
}

#[test]
fn every_key_survives_writing_and_reading() {
    let mut config = Config::default();
    config.node.id = 7;
    config.node.durability = Durability::Disk;
    config.node.transport = Transport::Shm;
    config.node.region = "/a \"quoted\" path".into();
    config.node.metrics = Metrics(Some("127.0.0.1:1".parse().unwrap()));
    config.log.lane_bytes = Size(12345 * 4096);
    config.cluster.failure_timeout = Duration::from_micros(1_500_001);
    config.service.cores = Cores(vec![0, 2, 3, 4, 9]);
    assert_eq!(config.service.cores.show(), "\"0,2-4,9\"");
    assert_eq!(Config::parse("x", &config.render()).unwrap(), config);
}

#[test]
fn errors_name_file_line_key_and_remedy() {
    let cases = [
        ("[node]\nidd = 2", "f:2: node.idd", "\"id\""),
        ("[nod]\nid = 2", "f:1: [nod]", "[node]"),
        ("\n\n[node]\nlane_bytes = 2", "f:4: node.lane_bytes", "[log]"),
        ("[node]\nid = \"2\"", "f:2: node.id is not a whole number", "without quotes"),
        ("[node]\nid = -1", "f:2: node.id is not a whole number", "from 0"),
        ("[node]\ncapacity = \"4 GiBB\"", "f:2: node.capacity", "64MiB"),
        ("[node]\nregion = \"rel\"", "f:2: node.region", "begins with /"),
        ("[node]\nlisten = \"localhost\"", "f:2: node.listen", "IP:PORT"),
        ("[node]\nmetrics = \"0.0.0.0:80\"", "f:2: node.metrics", "loopback"),
        ("[node]\ntransport = \"rdma\"", "f:2: node.transport", "tcp"),
        ("[service]\ncores = \"3-1\"", "f:2: service.cores", "2,4-7"),
        ("[service]\ncores = \"1,\"", "f:2: service.cores", "2,4-7"),
        ("[service]\ncores = \"0-2000\"", "f:2: service.cores", "below 1024"),
        ("node = 3", "f:1: node is not a section", "[node]"),
        ("[node\nid = 1", "f:1: the text is no TOML", "key = value"),
    ];
    for (text, message, remedy) in cases {
        let failure = Config::parse("f", text).unwrap_err();
        assert!(failure.message.starts_with(message), "{text:?}: {}", failure.message);
        assert!(failure.remedy.contains(remedy), "{text:?}: {}", failure.remedy);
        assert_eq!(failure.exit_code(), 3);
    }
}

/// Assise's services have no cores of their own.
#[test]
fn the_ways_of_assise_go_with_no_cores() {
    for (way, refused) in
        [("host", true), ("host-background", true), ("serial", false), ("pipelined", false)]
    {
        let way = format!("service.pipeline={way}");
        Config::load(None, std::slice::from_ref(&way)).expect("without cores");
        match Config::load(None, &[way.clone(), "service.cores=\"0\"".into()]) {
            Ok(_) => assert!(!refused, "{way}"),
            Err(failure) => {
                assert!(refused && failure.message.contains("service.cores is \"0\""), "{failure}");
                assert!(failure.remedy.contains("leave it out"), "{}", failure.remedy);
            }
        }
    }
}

#[test]
fn bounds_are_checked() {
    let refused = [
        "node.id=0",
        "cluster.replicas=0",
        "cluster.replicas=99",
        "log.lanes=9",
        "log.lane_bytes=4MiB",
        "log.lane_bytes=8388609",
        "cluster.failure_timeout=100ms",
        "limits.low_watermark=70",
        "cluster.id=\"\"",
        "service.hold_back=101ms",
        "cluster.compression=gzip",
        "node.id=2x",
        "node.id",
        "id=2",
        "node.iq=2",
    ];
    for one in refused {
        assert!(Config::load(None, &[one.into()]).is_err(), "{one}");
    }
    // Leases would end between two heartbeats.
    let short = |timeout: &str| {
        let timeout = format!("cluster.failure_timeout={timeout}");
        Config::load(None, &["cluster.heartbeat=10ms".into(), timeout])
    };
    assert!(short("169ms").is_err() && short("170ms").is_ok());
    let config = Config::load(None, &["node.capacity=64MiB".into(), "node.id = 2".into()]).unwrap();
    assert_eq!((config.node.capacity.0, config.node.id), (64 << 20, 2));
}

#[test]
fn nearest_is_the_obvious_one() {
    assert_eq!(nearest("replica", SECTIONS[0].2.iter().copied()), "replicas");
    assert_eq!(distance("kitten", "sitting"), 3);
    assert_eq!(distance("", "abc"), 3);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    /// Any mutation of the documented file is read or refused with words, never a panic; what is
    /// read writes back to itself.
    #[test]
    fn mutated_files_are_read_or_refused(
        edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>(), 0..4u8), 1..8),
    ) {
        let mut bytes = DOCUMENTED.as_bytes().to_vec();
        for (at, byte, kind) in edits {
            let at = at.index(bytes.len());
            match kind {
                0 => bytes[at] = byte,
                1 => bytes[at] ^= 1 << (byte % 8),
                2 => bytes.insert(at, byte),
                _ => drop(bytes.drain(at..(at + usize::from(byte)).min(bytes.len() - 1))),
            }
        }
        let text = String::from_utf8_lossy(&bytes);
        match Config::parse("f", &text).and_then(|c| c.check("f").map(|()| c)) {
            Ok(config) => prop_assert_eq!(Config::parse("g", &config.render()).unwrap(), config),
            Err(failure) => {
                prop_assert!(failure.message.starts_with("f:"), "{}", failure.message);
                prop_assert!(!failure.remedy.is_empty());
            }
        }
    }

    #[test]
    fn any_override_is_taken_or_refused(text in "[a-z._]{0,12}=?.{0,12}") {
        if let Err(failure) = Config::load(None, &[text]) {
            prop_assert!(!failure.remedy.is_empty());
        }
    }
}
