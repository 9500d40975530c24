//! Playing a sound so that somebody can hear it.

use std::path::Path;
use std::time::Duration;

use tokio::process::Command;
use tokio_util::sync::CancellationToken;

use crate::node::capabilities::program::{self, Bounds};

/// How much longer than its sound a player may take.
const SLACK: Duration = Duration::from_secs(15);
/// What is kept of the output of a program.
const OUTPUT: usize = 4096;

/// Plays a WAV file to its end. Whether it was audible, as far as this machine can know.
pub(super) async fn play(file: &Path, length: Duration, pulse_server: Option<&str>) -> bool {
    if has_only_a_dummy(pulse_server).await {
        tracing::debug!("the sound server has no device");
        return false;
    }
    for player in players(file, pulse_server) {
        if run(player, length + SLACK).await.is_some() {
            return true;
        }
    }
    false
}

/// What a program says, if it ends well.
async fn run(command: Command, time: Duration) -> Option<Vec<u8>> {
    // Dropped, when nobody wants to hear it any more.
    let ended = program::run(command, b"", Bounds { time, output: OUTPUT }, &CancellationToken::new()).await;
    if !ended.is_success() {
        tracing::debug!(exit = ?ended.exit, "a program for sound fails");
    }
    ended.is_success().then_some(ended.stdout.bytes)
}

/// Sound servers without a device play into nothing, and say that they have played.
#[cfg(all(unix, not(target_os = "macos")))]
async fn has_only_a_dummy(pulse_server: Option<&str>) -> bool {
    const PATIENCE: Duration = Duration::from_secs(5);
    let Some(mut pactl) = with_server("pactl", pulse_server) else { return false };
    pactl.arg("info").env("LC_ALL", "C");
    let info = run(pactl, PATIENCE).await.unwrap_or_default();
    String::from_utf8_lossy(&info).lines().any(|line| line.trim() == "Default Sink: auto_null")
}

/// The players that there are. Which one has a sound server or a device to play to is found out by trying; a server
/// that is given is the only one.
#[cfg(all(unix, not(target_os = "macos")))]
fn players(file: &Path, pulse_server: Option<&str>) -> Vec<Command> {
    let players = [("paplay", &[][..]), ("pw-play", &[]), ("aplay", &["-q"])];
    let count = if pulse_server.is_some() { 1 } else { players.len() };
    let players = players.into_iter().take(count).filter_map(|(name, args)| {
        let mut player = with_server(name, pulse_server)?;
        player.args(args).arg(file);
        Some(player)
    });
    players.collect()
}

#[cfg(all(unix, not(target_os = "macos")))]
fn with_server(name: &str, pulse_server: Option<&str>) -> Option<Command> {
    let mut command = Command::new(program::find(name)?);
    if let Some(server) = pulse_server {
        command.env("PULSE_SERVER", server);
    }
    Some(command)
}

#[cfg(not(all(unix, not(target_os = "macos"))))]
async fn has_only_a_dummy(_: Option<&str>) -> bool {
    false
}

#[cfg(target_os = "macos")]
fn players(file: &Path, _: Option<&str>) -> Vec<Command> {
    let player = program::find("afplay").map(|afplay| {
        let mut command = Command::new(afplay);
        command.arg(file);
        command
    });
    player.into_iter().collect()
}

/// Not tested: it needs a Windows desktop.
#[cfg(windows)]
fn players(file: &Path, _: Option<&str>) -> Vec<Command> {
    use crate::node::capabilities::powershell;
    let script = "$ErrorActionPreference = 'Stop'; (New-Object Media.SoundPlayer $env:OPENCLAW_FILE).PlaySync()";
    let player = file.to_str().and_then(|file| powershell::command(script, &[("OPENCLAW_FILE", file)]));
    player.into_iter().collect()
}
