//! Looking at displays, which may block, and which of them.

use std::time::Duration;

use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;

use crate::node::capabilities::media::Failure;

/// How long a look may take, waiting for its turn included.
const LOOK_TIMEOUT: Duration = Duration::from_secs(10);

/// One at a time: a picture of a large desktop takes a hundred megabytes before it is encoded.
static TURN: Semaphore = Semaphore::const_new(1);

/// A display's place on the desktop, in pixels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Monitor {
    pub(super) x: i32,
    pub(super) y: i32,
    pub(super) width: u32,
    pub(super) height: u32,
}

/// What goes wrong while looking, for the log.
pub(super) type Error = Box<dyn std::error::Error + Send + Sync>;

/// The display that is asked for, else the first one, which is the primary one.
pub(super) fn choose(monitors: &[Monitor], index: u32) -> Option<Monitor> {
    let chosen = usize::try_from(index).ok().and_then(|index| monitors.get(index));
    chosen.or_else(|| monitors.first()).copied()
}

/// Looks on a thread where that may block. The token tells it that its time is over.
pub(super) async fn look<T: Send + 'static>(
    cancel: &CancellationToken,
    work: impl FnOnce(&CancellationToken) -> Result<T, Error> + Send + 'static,
) -> Result<T, Failure> {
    let stop = cancel.child_token();
    let _stop_when_dropped = stop.clone().drop_guard();
    let looked = async {
        let turn = TURN.acquire().await?;
        let work = move || {
            let _turn = turn;
            work(&stop)
        };
        tokio::task::spawn_blocking(work).await?
    };
    match cancel.run_until_cancelled(tokio::time::timeout(LOOK_TIMEOUT, looked)).await {
        Some(Ok(result)) => result.map_err(Failure::other),
        Some(Err(_)) => Err(Failure::other("looking took too long")),
        None => Err(Failure::Cancelled),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_display_that_is_not_there_is_the_primary_one() {
        let monitors = [0, 800].map(|x| Monitor { x, y: 0, width: 800, height: 600 });
        let x = |index| choose(&monitors, index).map(|monitor| monitor.x);
        assert_eq!([x(0), x(1), x(2), x(32)], [Some(0), Some(800), Some(0), Some(0)]);
        assert_eq!(choose(&[], 0), None);
    }

    #[tokio::test]
    async fn a_look_that_nobody_waits_for_is_told_to_end() {
        let (started, start) = tokio::sync::oneshot::channel();
        let (ended, end) = std::sync::mpsc::channel();
        let stubborn = move |stop: &CancellationToken| -> Result<(), Error> {
            started.send(()).unwrap();
            while !stop.is_cancelled() {
                std::thread::sleep(Duration::from_millis(1));
            }
            ended.send(()).unwrap();
            Err("stopped".into())
        };
        let cancel = CancellationToken::new();
        let (looked, ()) = tokio::join!(look(&cancel, stubborn), async {
            start.await.unwrap();
            cancel.cancel();
        });
        assert!(matches!(looked, Err(Failure::Cancelled)));
        end.recv_timeout(Duration::from_secs(10)).unwrap();
        assert_eq!(look(&CancellationToken::new(), |_| Ok(1)).await.unwrap(), 1);
    }
}
