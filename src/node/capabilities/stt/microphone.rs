//! Recording sound with a program that there is.

use std::process::Stdio;
use std::time::Duration;

use tokio::io::AsyncReadExt;
use tokio::process::Command;
use tokio::time::{Instant, timeout_at};

use super::{Options, SAMPLE_RATE};
use crate::node::capabilities::program::{Group, find};

/// How long a recorder may take until it gives its first sound.
const START: Duration = Duration::from_secs(3);
/// The bytes of one read: an eighth of a second.
const CHUNK: usize = SAMPLE_RATE / 4;

/// Whether there is a program that records.
pub(super) fn is_there() -> bool {
    PROGRAMS.iter().any(|program| find(program).is_some())
}

/// Records for `time`, or until `is_enough` says so of what it has heard piece by piece. What there is of a recording
/// that breaks off is returned. Dropping the future ends it.
///
/// # Errors
/// If no recorder gives a sound.
pub(super) async fn record(
    options: &Options,
    time: Duration,
    mut is_enough: impl FnMut(&[i16]) -> bool,
) -> Result<Vec<i16>, String> {
    for recorder in recorders(options).await {
        let samples = record_with(recorder, time, &mut is_enough).await;
        match samples {
            Ok(samples) if !samples.is_empty() => return Ok(samples),
            Ok(_) => tracing::debug!("a recorder gives no sound"),
            Err(error) => tracing::debug!(%error, "a recorder does not start"),
        }
    }
    Err("no recorder gives a sound".to_owned())
}

async fn record_with(
    mut recorder: Command,
    time: Duration,
    is_enough: &mut impl FnMut(&[i16]) -> bool,
) -> std::io::Result<Vec<i16>> {
    let wanted = samples_in(time);
    recorder.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut group = Group::start(recorder)?;
    let Some(mut sound) = group.0.stdout().take() else { return Ok(Vec::new()) };
    let (mut samples, mut odd) = (Vec::new(), None);
    let mut chunk = vec![0; CHUNK];
    let mut end = Instant::now() + START;
    while samples.len() < wanted {
        let Ok(Ok(count @ 1..)) = timeout_at(end, sound.read(&mut chunk)).await else { break };
        if samples.is_empty() {
            end = Instant::now() + time + START;
        }
        let bytes: Vec<u8> = odd.take().into_iter().chain(chunk[..count].iter().copied()).collect();
        let pairs = bytes.chunks_exact(2);
        odd = pairs.remainder().first().copied();
        let new = samples.len();
        samples.extend(pairs.map(|pair| i16::from_le_bytes([pair[0], pair[1]])).take(wanted - new));
        if is_enough(&samples[new..]) {
            break;
        }
    }
    Ok(samples)
}

/// How many samples a recording of this length has.
fn samples_in(time: Duration) -> usize {
    usize::try_from(time.as_millis()).map_or(usize::MAX, |milliseconds| milliseconds * SAMPLE_RATE / 1000)
}

/// A recorder of 16-bit samples on stdout.
fn recorder(program: &str, args: &[&str]) -> Option<Command> {
    let mut command = Command::new(find(program)?);
    command.args(args);
    Some(command)
}

/// What ffmpeg is told to make of its input.
const FFMPEG_OUTPUT: [&str; 7] = ["-ac", "1", "-ar", "16000", "-f", "s16le", "-"];

fn ffmpeg(format: &str, input: &str) -> Option<Command> {
    let mut command = recorder("ffmpeg", &["-nostdin", "-loglevel", "error", "-f", format, "-i", input])?;
    command.args(FFMPEG_OUTPUT);
    Some(command)
}

#[cfg(all(unix, not(target_os = "macos")))]
const PROGRAMS: &[&str] = &["parec", "ffmpeg", "pw-record", "arecord"];

/// The recorders that there are. Which one has a sound server or a device to listen to is found out by trying; a server
/// that is given is the only one.
#[cfg(all(unix, not(target_os = "macos")))]
async fn recorders(options: &Options) -> Vec<Command> {
    let device = options.microphone.as_deref();
    let flag = |flag: &str| device.map(|device| format!("{flag}{device}"));
    let parec = recorder("parec", &["--raw", "--format=s16le", "--rate=16000", "--channels=1", "--latency-msec=50"]);
    let parec = parec.map(|mut parec| {
        parec.args(flag("--device="));
        parec
    });
    let pulse = [parec, ffmpeg("pulse", device.unwrap_or("default"))];
    if let Some(server) = &options.pulse_server {
        let pulse = pulse.into_iter().flatten().map(|mut recorder| {
            recorder.env("PULSE_SERVER", server);
            recorder
        });
        return pulse.collect();
    }
    let pw_record = recorder("pw-record", &["--format=s16", "--rate=16000", "--channels=1"]);
    let pw_record = pw_record.map(|mut pw_record| {
        pw_record.args(flag("--target=")).arg("-");
        pw_record
    });
    let arecord = recorder("arecord", &["-q", "-t", "raw", "-f", "S16_LE", "-r", "16000", "-c", "1"]);
    let arecord = arecord.map(|mut arecord| {
        arecord.args(flag("-D"));
        arecord
    });
    pulse.into_iter().chain([pw_record, arecord]).flatten().collect()
}

#[cfg(target_os = "macos")]
const PROGRAMS: &[&str] = &["ffmpeg"];

#[cfg(target_os = "macos")]
async fn recorders(options: &Options) -> Vec<Command> {
    let device = options.microphone.as_deref().unwrap_or("default");
    ffmpeg("avfoundation", &format!(":{device}")).into_iter().collect()
}

#[cfg(windows)]
const PROGRAMS: &[&str] = &["ffmpeg"];

/// Not tested: it needs a Windows desktop.
#[cfg(windows)]
async fn recorders(options: &Options) -> Vec<Command> {
    let device = match &options.microphone {
        Some(device) => Some(device.clone()),
        None => first_device().await,
    };
    device.and_then(|device| ffmpeg("dshow", &format!("audio={device}"))).into_iter().collect()
}

#[cfg(windows)]
async fn first_device() -> Option<String> {
    use crate::node::capabilities::program::{self, Bounds};
    let list = recorder("ffmpeg", &["-nostdin", "-hide_banner", "-list_devices", "true", "-f", "dshow", "-i", "-"])?;
    let bounds = Bounds { time: START, output: 64 * 1024 };
    // Dropped, when nobody listens any more.
    let ended = program::run(list, b"", bounds, &tokio_util::sync::CancellationToken::new()).await;
    first_audio(&String::from_utf8_lossy(&ended.stderr.bytes)).map(str::to_owned)
}

/// The first microphone in ffmpeg's list of devices.
#[cfg(any(windows, test))]
fn first_audio(list: &str) -> Option<&str> {
    let line = list.lines().find(|line| line.trim_end().ends_with("(audio)"))?;
    let (_, name) = line.split_once('"')?;
    Some(name.rsplit_once('"')?.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_microphone_is_found_in_a_list_of_devices() {
        let list = "[dshow @ 01] \"Camera\" (video)\r\n[dshow @ 01]   Alternative name \"@device_pnp\"\r\n\
                    [dshow @ 01] \"Microphone (High Definition)\" (audio)\r\n[dshow @ 01] \"Other\" (audio)\r\n";
        assert_eq!(first_audio(list), Some("Microphone (High Definition)"));
        assert_eq!(first_audio("Could not enumerate audio only devices"), None);
    }

    #[cfg(unix)]
    #[tokio::test]
    async fn a_recording_ends_when_it_is_long_enough_or_breaks_off() {
        let sound = |script: &str| {
            let mut command = Command::new("/bin/sh");
            command.args(["-c", script]);
            command
        };
        let second = Duration::from_secs(1);
        let endless = record_with(sound("exec cat /dev/zero"), second, &mut |_| false).await.unwrap();
        assert_eq!(endless.len(), SAMPLE_RATE);
        // 0x6261 twice, with a byte too many, in two pieces.
        let short = record_with(sound("printf aba; sleep 0.2; printf bX"), second, &mut |_| false).await.unwrap();
        assert_eq!(short, [0x6261, 0x6261]);
        let mut heard = 0;
        let mut is_enough = |new: &[i16]| {
            heard += new.len();
            heard > 100
        };
        let enough = record_with(sound("exec cat /dev/zero"), second, &mut is_enough).await.unwrap();
        assert!(enough.len() < SAMPLE_RATE);
        assert_eq!(record_with(sound("exit 1"), second, &mut |_| false).await.unwrap(), [0; 0]);
    }
}
