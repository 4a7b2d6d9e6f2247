//! A connection that is made when it is first needed, shared by all who name the same user and configuration, and made anew after it
//! was lost. A cluster that is not there now is tried again, but not by everybody who asks.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use base::Errno;

use crate::SHUT_OUT;
use crate::librados::{self, Cluster, Purpose};

/// After a try that failed there is none for this long.
const PAUSE: Duration = Duration::from_secs(2);
/// Those that there are.
static ALL: Mutex<Vec<Weak<Connection>>> = Mutex::new(Vec::new());

#[derive(Debug)]
enum State {
    None,
    Failed(Instant, String),
    Made(Arc<Cluster>),
}

/// The connection.
#[derive(Debug)]
pub struct Connection {
    user: Option<String>,
    conf: Option<String>,
    patience: Duration,
    state: Mutex<State>,
}

impl Connection {
    /// That of a user and a configuration; nothing is asked yet, but the library is loaded.
    ///
    /// # Errors
    /// There is no library; with what to do.
    pub fn to(
        user: Option<&str>,
        conf: Option<&str>,
        patience: Duration,
    ) -> Result<Arc<Self>, String> {
        librados::load()?;
        let mut all = ALL.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|connection| connection.strong_count() > 0);
        let is_same = |connection: &Arc<Self>| {
            let names = (connection.user.as_deref(), connection.conf.as_deref());
            names == (user, conf) && connection.patience == patience
        };
        if let Some(there) = all.iter().filter_map(Weak::upgrade).find(is_same) {
            return Ok(there);
        }
        let connection = Arc::new(Self {
            user: user.map(str::to_owned),
            conf: conf.map(str::to_owned),
            patience,
            state: Mutex::new(State::None),
        });
        all.push(Arc::downgrade(&connection));
        Ok(connection)
    }

    /// After this a request is given up.
    pub fn patience(&self) -> Duration {
        self.patience
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The cluster, connected to now if it was not.
    ///
    /// # Errors
    /// What is wrong and what to do.
    pub fn cluster(&self) -> Result<Arc<Cluster>, String> {
        let mut state = self.state();
        match &*state {
            State::Made(cluster) => return Ok(Arc::clone(cluster)),
            State::Failed(when, why) if when.elapsed() < PAUSE => return Err(why.clone()),
            _ => {}
        }
        // Others wait meanwhile: they need the same.
        match Cluster::connect(
            self.user.as_deref(),
            self.conf.as_deref(),
            self.patience,
            Purpose::Store,
        ) {
            Ok(cluster) => {
                let cluster = Arc::new(cluster);
                *state = State::Made(Arc::clone(&cluster));
                Ok(cluster)
            }
            Err(why) => {
                log::warn!("rados: {why}");
                *state = State::Failed(Instant::now(), why.clone());
                Err(why)
            }
        }
    }

    /// Hears of an error that came from a cluster: one that has shut this client out answers nothing any more, and the next
    /// who asks is another client.
    pub fn heard(&self, cluster: &Arc<Cluster>, errno: Errno) {
        if errno != SHUT_OUT {
            return;
        }
        let mut state = self.state();
        if matches!(&*state, State::Made(made) if Arc::ptr_eq(made, cluster)) {
            log::warn!("rados: the cluster has shut client.{} out", cluster.instance());
            *state = State::None;
        }
    }
}
