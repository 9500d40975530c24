//! What systemd hears of the program, if it started it and wants to know: see `sd_notify(3)`.
//!
//! Everywhere else this does nothing.

use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

#[cfg(unix)]
use {
    sd_notify::{NotifyState, notify, watchdog_enabled},
    std::time::Duration,
};

/// Says that the program serves and, once `shutdown` comes, that it stops. In between it gives the signs of life that
/// `WatchdogSec` asks for, each with what `pulse` says: if that hangs, so does the program, and systemd starts it anew.
/// It ends with what is returned.
#[cfg(unix)]
pub fn supervise(shutdown: CancellationToken, pulse: impl Fn() -> String + Send + 'static) -> JoinSet<()> {
    tell(&[NotifyState::Ready, NotifyState::Status(&pulse())]);
    let mut tasks = JoinSet::new();
    if let Some(limit) = watchdog_enabled().filter(|limit| *limit >= LEAST_LIMIT) {
        tasks.spawn(async move {
            // Half of the time, as systemd advises.
            let mut ticks = tokio::time::interval(limit / 2);
            loop {
                ticks.tick().await;
                tell(&[NotifyState::Watchdog, NotifyState::Status(&pulse())]);
            }
        });
    }
    tasks.spawn(async move {
        shutdown.cancelled().await;
        tell(&[NotifyState::Stopping]);
    });
    tasks
}

/// A timer cannot run faster than this, half of it at a time.
#[cfg(unix)]
const LEAST_LIMIT: Duration = Duration::from_millis(2);

/// Does something that systemd should wait for before it calls the settings reloaded.
pub async fn while_reloading<T>(reload: impl Future<Output = T>) -> T {
    #[cfg(unix)]
    match NotifyState::monotonic_usec_now() {
        // systemd 253 and newer want to know when it began.
        Ok(now) => tell(&[NotifyState::Reloading, now]),
        Err(error) => tracing::warn!(%error, "there is no clock"),
    }
    let result = reload.await;
    #[cfg(unix)]
    tell(&[NotifyState::Ready]);
    result
}

#[cfg(unix)]
fn tell(states: &[NotifyState<'_>]) {
    if let Err(error) = notify(states) {
        tracing::warn!(%error, "systemd cannot be told");
    }
}

/// Says nothing: there is no systemd.
#[cfg(not(unix))]
pub fn supervise(_: CancellationToken, _: impl Fn() -> String + Send + 'static) -> JoinSet<()> {
    JoinSet::new()
}
