//! For a quick look: `device SOCKET DIR|null [POLL_US] [THREADS]`
use std::sync::Arc;
fn main() {
    let a: Vec<String> = std::env::args().collect();
    let fs: Arc<dyn client::fs::FileSystem> = if a[2] == "null" {
        Arc::new(client::null::NullFs::default())
    } else {
        Arc::new(
            client::dir::DirFs::open(
                a[2].as_bytes(),
                client::dir::Options { impersonate: true, ..Default::default() },
            )
            .unwrap(),
        )
    };
    let fs = Arc::new(
        virtiofs::tenant::Tenant::new(fs, b"/", virtiofs::tenant::Options::default()).unwrap(),
    );
    let o = virtiofs::device::Options {
        poll: std::time::Duration::from_micros(a.get(3).map_or(20, |p| p.parse().unwrap())),
        threads: a.get(4).map_or(2, |p| p.parse().unwrap()),
        ..Default::default()
    };
    let d = virtiofs::device::Device::new(fs, o);
    let r = virtiofs::vhost::rings("x", 4).unwrap();
    let _c = d.start(&*r).unwrap();
    let _ = std::fs::remove_file(&a[1]);
    let l = std::os::unix::net::UnixListener::bind(&a[1]).unwrap();
    for s in l.incoming() {
        virtiofs::vhost::serve(&r, None, s.unwrap());
    }
}
