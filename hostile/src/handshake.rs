//! A node's port with keys, and strangers who begin handshakes and change what they send: with a certificate of their own, with
//! one that is another's, with none. Whoever has no right to be node 1 is not node 1; a node that keeps the rules is heard.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use base::NodeId;
use cluster::net::{Net, NetConfig};
use cluster::tls::{KeyPlace, Keys, Role};
use cluster::wire::{FrameHead, Hello};
use cluster::{Class, NetEvent, Peer, PeerAddress, Transport};
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair, SanType};
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::{DigitallySignedStruct, Error, SignatureScheme};

use crate::input::Input;

const NAME: &str = "here";
const CLUSTER: u128 = 7;
const VICTIM: NodeId = NodeId(5);
const HONEST: NodeId = NodeId(3);
/// Who the strangers say they are.
const CLAIMED: NodeId = NodeId(1);
const HELLO: u16 = 0xff01;
const STEPS: usize = 60;
const PATIENCE: Duration = Duration::from_secs(20);

/// A folder of this process for keys.
struct Folder(PathBuf);

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

struct Authority {
    issuer: Issuer<'static, KeyPair>,
    pem: String,
}

impl Authority {
    fn new() -> Self {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().expect("a key");
        let pem = params.self_signed(&key).expect("an authority").pem();
        Self { issuer: Issuer::new(params, key), pem }
    }

    fn issue(&self, role: Role) -> (rcgen::Certificate, KeyPair) {
        let mut params = CertificateParams::default();
        let name = format!("corbel://{NAME}/{role}");
        params.subject_alt_names = vec![SanType::URI(name.try_into().expect("a name"))];
        let key = KeyPair::generate().expect("a key");
        (params.signed_by(&key, &self.issuer).expect("a certificate"), key)
    }

    fn keys(&self, folder: &Path, role: Role) -> Keys {
        use std::os::unix::fs::OpenOptionsExt;
        let (cert, key) = self.issue(role);
        let at = folder.join(format!("{role}.pem"));
        let mut file = std::fs::OpenOptions::new();
        let file = file.write(true).create_new(true).mode(0o600).open(at);
        write!(file.expect("a file"), "{}{}", cert.pem(), key.serialize_pem()).expect("room");
        let place =
            KeyPlace { folder: folder.to_owned(), role, cluster: NAME.to_owned(), encrypts: true };
        Keys::open(place).expect("keys")
    }
}

/// Believes everybody.
#[derive(Debug)]
struct Credulous;

impl ServerCertVerifier for Credulous {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn verify_tls13_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        let provider = rustls::crypto::ring::default_provider();
        provider.signature_verification_algorithms.supported_schemes()
    }
}

struct Stranger {
    tls: rustls::ClientConnection,
    socket: TcpStream,
}

impl Stranger {
    /// `role`: whose certificate it has, of an authority that need not be that of the cluster.
    fn new(at: SocketAddr, authority: &Authority, role: Option<Role>) -> Self {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = rustls::ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&rustls::version::TLS13])
            .expect("TLS 1.3")
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(Credulous));
        let config = match role {
            None => builder.with_no_client_auth(),
            Some(role) => {
                let (cert, key) = authority.issue(role);
                let key = PrivateKeyDer::try_from(key.serialize_der()).expect("a key");
                builder.with_client_auth_cert(vec![cert.der().clone()], key).expect("a pair")
            }
        };
        let name = "whoever".try_into().expect("a name");
        let mut tls = rustls::ClientConnection::new(Arc::new(config), name).expect("a client");
        let hello = Hello {
            class: Class::LowLatency,
            from: CLAIMED,
            to: VICTIM,
            cluster: CLUSTER,
            incarnation: 1,
            session: 1,
            ring_bytes: None,
        };
        // Goes when the handshake is over.
        for class in Class::ALL {
            let body = Hello { class, ..hello }.encode();
            let head = FrameHead::new(HELLO, &[&body]).expect("a short body").encode();
            let _ = tls.writer().write_all(&[&head[..], &body].concat());
        }
        let socket = TcpStream::connect(at).expect("a port");
        socket.set_nonblocking(true).expect("a socket");
        Self { tls, socket }
    }

    /// Says what is its turn, changed or not.
    fn say(&mut self, input: &mut Input<'_>) {
        let mut bytes = Vec::new();
        while self.tls.wants_write() && self.tls.write_tls(&mut bytes).is_ok() {}
        let at = usize::from(input.u16()) % bytes.len().max(1);
        match input.below(8) {
            0 => bytes.truncate(at),
            1 => {
                if let Some(byte) = bytes.get_mut(at) {
                    *byte ^= input.u8();
                }
            }
            2 => bytes.extend_from_slice(input.piece()),
            3 => bytes = [&bytes[..], &bytes[..]].concat(),
            4 => bytes.splice(..0, input.piece().iter().copied()).for_each(drop),
            _ => {}
        }
        let _ = self.socket.write_all(&bytes);
    }

    fn hear(&mut self) {
        if self.tls.read_tls(&mut self.socket).is_ok_and(|got| got > 0) {
            let _ = self.tls.process_new_packets();
            let _ = self.tls.reader().read(&mut [0; 4096]);
        }
    }
}

/// The target.
pub fn run(bytes: &[u8]) {
    use std::sync::atomic::{AtomicU64, Ordering};
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    let mut input = Input::new(bytes);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    let name = format!("corbel-handshake-{}-{number}", std::process::id());
    let folder = Folder(std::env::temp_dir().join(name));
    std::fs::create_dir_all(&folder.0).expect("a folder for keys");
    let (ours, theirs) = (Authority::new(), Authority::new());
    std::fs::write(folder.0.join("authority.pem"), &ours.pem).expect("room");
    let net = |node: NodeId| {
        let mut config = NetConfig::new(node, 1, CLUSTER);
        config.tcp = "127.0.0.1:0".parse().ok();
        config.spin = Duration::ZERO;
        config.keys = Some(ours.keys(&folder.0, Role::Node(node)));
        Net::new(config).expect("a transport")
    };
    let (mut victim, mut honest) = (net(VICTIM), net(HONEST));
    let at = victim.tcp_address().expect("a port");
    let nowhere: SocketAddr = "127.0.0.1:9".parse().expect("an address");
    let peer = |node, at| Peer { node, address: PeerAddress::Tcp(at) };
    victim.set_peers(&[peer(CLAIMED, nowhere), peer(HONEST, nowhere)]);
    let mut strangers: Vec<Stranger> = Vec::new();
    let mut entitled = false;
    let mut heard = false;
    let mut poll = |victim: &mut Net, entitled: bool| {
        let mut events = Vec::new();
        victim.poll(Some(Duration::ZERO), &mut events);
        for event in events {
            match event {
                NetEvent::Up { node, .. } if node != HONEST => {
                    assert!(entitled, "{node} is up, and nobody has its certificate");
                }
                NetEvent::Frame { from: HONEST, kind, .. } => heard |= kind == 9,
                _ => {}
            }
        }
        heard
    };
    for _ in 0..STEPS {
        if input.is_empty() {
            break;
        }
        match input.below(4) {
            0 if strangers.len() < 6 => {
                let roles =
                    [Role::Node(CLAIMED), Role::Node(NodeId(2)), Role::Coordinator, Role::Admin];
                let role = roles.get(input.below(5)).copied();
                let authority = if input.flag() { &ours } else { &theirs };
                entitled |= role == Some(roles[0]) && std::ptr::eq(authority, &ours);
                strangers.push(Stranger::new(at, authority, role));
            }
            0 => drop(strangers.remove(input.below(6))),
            1 | 2 if !strangers.is_empty() => {
                let who = input.below(strangers.len());
                strangers[who].say(&mut input);
            }
            _ => strangers.iter_mut().for_each(Stranger::hear),
        }
        poll(&mut victim, entitled);
    }
    honest.set_peers(&[peer(VICTIM, at)]);
    let start = Instant::now();
    let mut said = false;
    let mut events = Vec::new();
    while !poll(&mut victim, entitled) {
        assert!(start.elapsed() < PATIENCE, "the honest node is not heard");
        honest.poll(Some(Duration::from_millis(1)), &mut events);
        said |= honest.is_up(VICTIM) && honest.send(VICTIM, Class::LowLatency, 9, &[b"x"]).is_ok();
        if said {
            std::thread::yield_now();
        }
    }
    // No wait for the closing of ports: many inputs follow each other.
    for stranger in &strangers {
        let _ = rustix::net::sockopt::set_socket_linger(&stranger.socket, Some(Duration::ZERO));
    }
}
