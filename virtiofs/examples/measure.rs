//! For a quick look: loads against the device at a socket. `measure SOCKET...`
use virtiofs::driver::{Config, Driver};
use virtiofs::measure::{self, Load};
fn main() {
    let sockets: Vec<String> = std::env::args().skip(1).collect();
    let config = Config { queues: 1, slots: 32, size: 1024, data: 64 << 10, ..Config::default() };
    let mut drivers: Vec<_> = sockets
        .iter()
        .map(|s| {
            let mut d = Driver::connect(s.as_ref(), config).unwrap();
            d.init().unwrap();
            let t = measure::target(&mut d, "m", 16 << 20).unwrap();
            (d, t)
        })
        .collect();
    for (load, depth, count) in [
        (Load::Read(4096), 1, 2000),
        (Load::Read(4096), 32, 8000),
        (Load::Read(65536), 1, 1000),
        (Load::Read(65536), 32, 2000),
        (Load::Write(4096), 1, 2000),
        (Load::Write(4096), 32, 8000),
        (Load::Write(65536), 1, 1000),
        (Load::Write(65536), 32, 2000),
        (Load::Getattr, 1, 2000),
        (Load::Getattr, 32, 8000),
        (Load::WriteFsync, 1, 50),
    ] {
        let mut all = vec![Vec::new(); drivers.len()];
        for round in 0..5 {
            for (i, (d, t)) in drivers.iter_mut().enumerate() {
                let r = measure::run(&mut d.queues[1], load, *t, depth, count, round).unwrap();
                all[i].push(r.mean_us());
            }
        }
        print!("{load:?} x{depth}:");
        for a in &mut all {
            a.sort_by(f64::total_cmp);
            print!(" {:.1}", a[2]);
        }
        println!("  ratio {:.2}", all[0][2] / all[all.len() - 1][2]);
    }
}
