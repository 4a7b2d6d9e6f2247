//! `corbel rados`: where objects of a Ceph cluster lie, computed here from the cluster's map.

use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ::rados::osdmap::{Mapped, Mapper, NONE, OsdMap, Pg, Pool, Share, Spread};
use ::rados::{Cluster, ImagePlace, OSD_MAP_MAX, PATIENCE, Place, Purpose};
use block::rbd::header::Header;
use clap::{Args, Subcommand};
use serde_json::{Value, json};

use crate::failure::{Context, Failure, Kind, Result};
use crate::output::Output;
use crate::units::show_bytes;

/// Objects of an image at most: a PiB of the usual ones.
const OBJECTS_MAX: u64 = 1 << 28;
/// Of what is printed each.
const LIST_MAX: u64 = 1 << 20;

/// Verbs of `corbel rados`.
#[derive(Subcommand, Debug)]
pub enum RadosVerb {
    /// Say in which placement groups and on which OSDs objects lie, and how evenly
    #[command(after_help = "Examples:\n  \
        corbel rados map rbd:vms/disk                  all objects that an image may have: how evenly they lie\n  \
        corbel rados map rbd:vms/disk --list           each of them as well\n  \
        corbel rados map rados:fast/ns name1 name2     these objects of a pool\n  \
        corbel rados map rados:fast                    the placement groups of a pool\n  \
        ceph osd getmap -o map; corbel rados map rados:fast --osdmap map --json\n\n\
        WHAT is rados:[USER@]POOL[/NAMESPACE[/PREFIX]][?conf=FILE] or rbd:[USER@]POOL[/NAMESPACE]/IMAGE[?conf=FILE]. The map is the\n\
        cluster's of this moment, asked for through librados (apt install librados2), unless a file has it; of OSDs nothing is asked,\n\
        so objects of an image that were never written count as well. Namespace and prefix are of names: a placement group has neither.\n\
        How evenly: among the OSDs that have anything of the pool.")]
    Map(MapArgs),
}

/// Arguments of `corbel rados map`.
#[derive(Args, Debug)]
pub struct MapArgs {
    /// A pool, or an image of RBD
    what: String,
    /// Objects; without any, all that the image may have, or the placement groups of the pool
    objects: Vec<String>,
    /// Print each object of the image, or each placement group of the pool: 1,048,576 at most
    #[arg(long, conflicts_with = "objects")]
    list: bool,
    /// Take the map from a file that ceph osd getmap has written
    #[arg(long, value_name = "FILE")]
    osdmap: Option<PathBuf>,
}

fn usage(message: impl Into<String>) -> Failure {
    Failure::new(Kind::Usage, message, "see corbel rados map --help")
}

fn connect(place: &Place, remedy: &'static str) -> Result<Arc<Cluster>> {
    let (user, conf) = (place.user.as_deref(), place.conf.as_deref());
    let cluster = Cluster::connect(user, conf, PATIENCE, Purpose::Store);
    Ok(Arc::new(cluster.map_err(|error| Failure::new(Kind::Unreachable, error, remedy))?))
}

/// The map that a file has.
fn read(file: &Path) -> Result<OsdMap> {
    let most = OSD_MAP_MAX as u64;
    let mut bytes = Vec::new();
    let opened = std::fs::File::open(file).context(file.display())?;
    opened.take(most + 1).read_to_end(&mut bytes).context(file.display())?;
    let damaged = |error: String| {
        let remedy =
            "write it with ceph osd getmap -o FILE; that of a later Ceph takes a later corbel";
        Failure::new(Kind::Damaged, format!("{}: {error}", file.display()), remedy)
    };
    if bytes.len() as u64 > most {
        return Err(damaged(format!("no map of OSDs has more than {}", show_bytes(most))));
    }
    OsdMap::decode(&bytes).map_err(damaged)
}

/// What lies in a pool.
enum Things {
    /// Objects, by their names.
    Named(Vec<String>),
    /// Those of an image: what their names begin with, how many they are, bytes of one.
    Image(String, u64, u64),
    /// As many as there are placement groups: one in each.
    One,
}

/// Runs `corbel rados …`.
pub fn run(out: &Output, verb: &RadosVerb) -> Result<()> {
    match verb {
        RadosVerb::Map(args) => map(out, args),
    }
}

fn map(out: &Output, args: &MapArgs) -> Result<()> {
    let from_file = args.osdmap.as_deref().map(read).transpose()?;
    let (place, things, map) = match args.what.split_once(':') {
        Some(("rados", text)) => {
            let place: Place = text.parse().map_err(usage)?;
            let names = args.objects.iter().map(|name| format!("{}{name}", place.prefix));
            let things = match args.objects.is_empty() {
                true => Things::One,
                false => Things::Named(names.collect()),
            };
            let map = match from_file {
                Some(map) => map,
                None => {
                    ask(&*connect(&place, "see ceph -s; --osdmap FILE takes the map from a file")?)?
                }
            };
            (place, things, map)
        }
        Some(("rbd", text)) => {
            let at: ImagePlace = text.parse().map_err(usage)?;
            if from_file.is_some() || !args.objects.is_empty() {
                return Err(usage("an image is asked how large it is: no names and no --osdmap"));
            }
            let remedy =
                "see ceph -s; rados:POOL --osdmap FILE maps the placement groups of its pool";
            let cluster = connect(&at.place, remedy)?;
            let things = image(&cluster, &at)?;
            let map = ask(&cluster)?;
            (at.place, things, map)
        }
        _ => {
            return Err(usage(format!("{:?} is neither rados:POOL nor rbd:POOL/IMAGE", args.what)));
        }
    };
    let Some((number, pool)) = map.pool(&place.pool) else {
        let what = format!("there is no pool {}", place.pool);
        return Err(Failure::failed(what, "see ceph osd lspools"));
    };
    let many = match &things {
        Things::Image(_, count, _) => *count,
        Things::Named(_) => 0,
        Things::One => pool.pg_num.into(),
    };
    if args.list && many > LIST_MAX {
        let what = format!("{many} are too many to be listed: {LIST_MAX} at most");
        return Err(Failure::failed(what, "leave --list out, or name objects"));
    }
    let found = Found::new(&map, number, pool, place.namespace.as_bytes(), things, args.list);
    let found = found.map_err(|error| Failure::failed(error, "see ceph osd dump"))?;
    if out.json {
        println!("{}", found.json(&map, number, pool));
    } else {
        found.print(&args.what, &map, number, pool);
    }
    Ok(())
}

fn ask(cluster: &Cluster) -> Result<OsdMap> {
    cluster.osd_map().map_err(|error| Failure::failed(error, "see ceph -s"))
}

fn image(cluster: &Arc<Cluster>, at: &ImagePlace) -> Result<Things> {
    let place = &at.place;
    let io = cluster.io(&place.pool, &place.namespace).map_err(|errno| {
        let what = format!("the pool {}: {errno}", place.pool);
        Failure::failed(what, "see ceph osd lspools")
    })?;
    let header = Header::read(&Arc::new(io), at)
        .map_err(|error| Failure::failed(error, "see docs/block.md, RBD"))?;
    let bytes = 1u64 << header.order;
    let count = header.size.div_ceil(bytes);
    if count > OBJECTS_MAX {
        let what = format!("{} has {count} objects, more than {OBJECTS_MAX}", at.image);
        return Err(Failure::failed(what, "map the placement groups of its pool"));
    }
    Ok(Things::Image(header.prefix, count, bytes))
}

/// Where it all lies.
struct Found {
    /// What is shown each, with its placement group.
    names: Vec<(Option<String>, Pg)>,
    /// Where these lie.
    mapped: Mapped,
    /// How many objects there are, and bytes of one, where all of an image was asked for.
    objects: Option<(u64, Option<u64>)>,
    /// Placement groups that have any of them.
    pgs: usize,
    spread: Spread,
}

impl Found {
    fn new(
        map: &OsdMap,
        number: i64,
        pool: &Pool,
        namespace: &[u8],
        things: Things,
        list: bool,
    ) -> std::result::Result<Self, String> {
        let mut mapper = Mapper::new(map)?;
        // How many of them are in each placement group.
        let mut counts = vec![0u64; pool.pg_num as usize];
        let mut names = Vec::new();
        let mut put = |name: String, shown: bool| {
            let pg = pool.pg_of(number, namespace, name.as_bytes())?;
            counts[pg.seed as usize] += 1;
            if shown {
                names.push((Some(name), pg));
            }
            Ok::<_, String>(())
        };
        let objects = match things {
            Things::Named(all) => {
                let count = all.len() as u64;
                all.into_iter().try_for_each(|name| put(name, true))?;
                Some((count, None))
            }
            Things::Image(prefix, count, bytes) => {
                (0..count).try_for_each(|object| put(format!("{prefix}.{object:016x}"), list))?;
                Some((count, Some(bytes)))
            }
            Things::One => {
                counts.fill(1);
                if list {
                    names =
                        (0..pool.pg_num).map(|seed| (None, Pg { pool: number, seed })).collect();
                }
                None
            }
        };
        let seeds: Vec<u32> = names.iter().map(|(_, pg)| pg.seed).collect();
        let mapped = mapper.map(number, &seeds)?;
        let pgs = counts.iter().filter(|count| **count > 0).count();
        let spread = mapper.spread(number, |seed| counts[seed as usize])?;
        Ok(Self { names, mapped, objects, pgs, spread })
    }

    fn json(&self, map: &OsdMap, number: i64, pool: &Pool) -> Value {
        let list = |osds: &[i32]| -> Vec<Option<i32>> {
            osds.iter().map(|osd| (*osd != NONE).then_some(*osd)).collect()
        };
        let each = self.names.iter().enumerate().map(|(i, (name, pg))| {
            let (up, acting) = (list(self.mapped.up.get(i)), list(self.mapped.acting.get(i)));
            json!({"object": name, "pg": pg.to_string(), "up": up, "up_primary": self.mapped.up_primary[i],
                "acting": acting, "acting_primary": self.mapped.acting_primary[i]})
        });
        let each: Vec<Value> = each.collect();
        let osds = self.spread.osds.iter();
        let osds = osds.map(
            |(osd, share)| json!({"osd": osd, "copies": share.copies, "primary": share.first}),
        );
        let osds: Vec<Value> = osds.collect();
        json!({"pool": pool.name, "pool_id": number, "epoch": map.epoch, "pg_num": pool.pg_num,
            "objects": self.objects.map(|(count, _)| count), "pgs": self.pgs, "osds": osds,
            "copies_max_over_mean": self.spread.max_over_mean(|share| share.copies),
            "primary_max_over_mean": self.spread.max_over_mean(|share| share.first), "mapped": each})
    }

    fn print(&self, what: &str, map: &OsdMap, number: i64, pool: &Pool) {
        let shown = |osds: &[i32]| {
            let osds = osds.iter().map(|osd| match *osd {
                NONE => "-".to_owned(),
                osd => osd.to_string(),
            });
            let osds = osds.collect::<Vec<_>>();
            if osds.is_empty() { "nowhere".to_owned() } else { osds.join(",") }
        };
        for (i, (name, pg)) in self.names.iter().enumerate() {
            let name = name.as_ref().map(|name| format!("{name}  ")).unwrap_or_default();
            let (up, acting) = (self.mapped.up.get(i), self.mapped.acting.get(i));
            let primary = self.mapped.acting_primary[i];
            let primary = primary.map_or_else(|| "none".to_owned(), |osd| format!("osd.{osd}"));
            let up = if up == acting { String::new() } else { format!("  (up {})", shown(up)) };
            println!("{}{pg}  {}  primary {primary}{up}", name.escape_debug(), shown(acting));
        }
        let objects = match self.objects {
            Some((count, Some(bytes))) => format!("{count} objects of {} in ", show_bytes(bytes)),
            Some((count, None)) => format!("{count} objects in "),
            None => String::new(),
        };
        let (pgs, pg_num, epoch) = (self.pgs, pool.pg_num, map.epoch);
        println!(
            "{what}: {objects}{pgs} of {pg_num} placement groups of pool {number}, epoch {epoch}"
        );
        for (osd, Share { copies, first }) in &self.spread.osds {
            println!("  osd.{osd:<5} {copies:>10} copies, of {first} the primary");
        }
        let ratio = |what: Option<f64>| what.map_or_else(|| "-".to_owned(), |r| format!("{r:.3}"));
        println!(
            "  most / mean: copies {}, primaries {}",
            ratio(self.spread.max_over_mean(|share| share.copies)),
            ratio(self.spread.max_over_mean(|share| share.first))
        );
    }
}
