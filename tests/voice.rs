//! Speaking and listening: a real synthesizer, a real sound server without a device, a real recognizer.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use openclaw_mcp_proxy::node::capabilities::stt::{self, Stt};
use openclaw_mcp_proxy::node::capabilities::tts::{self, Tts};
use openclaw_mcp_proxy::node::capabilities::{Args, Capability, Request, Response};
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use crate::support::{PATIENCE, soon, timed, until};

/// A sound server of one test, whose loudspeaker is also its microphone.
struct Sound {
    folder: PathBuf,
    server: String,
    process: Child,
}

impl Sound {
    async fn start(name: &str) -> Self {
        Self::start_with(name, "speakers").await
    }

    async fn start_with(name: &str, speakers: &str) -> Self {
        let folder = folder(name);
        let socket = folder.join("native");
        let mut command = Command::new("pulseaudio");
        command.args(["-n", "--daemonize=no", "--use-pid-file=no", "--exit-idle-time=-1"]);
        command.arg(format!("--load=module-native-protocol-unix socket={} auth-anonymous=1", socket.display()));
        command.arg(format!("--load=module-null-sink sink_name={speakers} rate=48000"));
        for variable in ["HOME", "XDG_RUNTIME_DIR", "PULSE_RUNTIME_PATH"] {
            command.env(variable, &folder);
        }
        command.stdout(Stdio::null()).stderr(Stdio::null());
        let process = command.spawn().expect("pulseaudio starts; install the package pulseaudio");
        until(async || std::os::unix::net::UnixStream::connect(&socket).is_ok()).await;
        Sound { server: format!("unix:{}", socket.display()), folder, process }
    }

    fn client(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command.env("PULSE_SERVER", &self.server);
        command
    }

    /// How many players are connected.
    fn players(&self) -> usize {
        let listed = self.client("pactl").args(["list", "short", "sink-inputs"]).output();
        let listed = listed.expect("pactl starts; install the package pulseaudio-utils");
        String::from_utf8_lossy(&listed.stdout).lines().count()
    }

    /// Whether somebody records.
    fn is_recorded(&self) -> bool {
        let listed = self.client("pactl").args(["list", "short", "source-outputs"]).output().unwrap();
        !listed.stdout.is_empty()
    }

    fn stt(&self) -> Stt {
        let stt = Stt::new(stt::Options { pulse_server: Some(self.server.clone()), ..stt::Options::default() });
        assert!(
            stt.is_available("stt.listen"),
            "nothing recognizes speech; install the packages pocketsphinx and pocketsphinx-en-us"
        );
        stt
    }

    fn tts(&self) -> Tts {
        Tts::new(tts::Options { pulse_server: Some(self.server.clone()), ..tts::Options::default() })
    }
}

impl Drop for Sound {
    fn drop(&mut self) {
        let _ended = self.process.kill();
        let _reaped = self.process.wait();
        let _removed = std::fs::remove_dir_all(&self.folder);
    }
}

/// A new folder.
fn folder(name: &str) -> PathBuf {
    let folder = std::env::temp_dir().join(format!("openclaw-voice-{name}-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    folder
}

fn request(command: &str, args: Value) -> Request {
    Request { command: command.to_owned(), args: Args::new(args), session_key: None }
}

/// Calls a command. Recording takes its time, and recognizers take theirs on a busy machine.
async fn call(capability: &impl Capability, command: &str, args: Value) -> Response {
    let response = capability.execute(request(command, args), CancellationToken::new());
    tokio::time::timeout(3 * PATIENCE, response).await.expect("it did not happen in time")
}

async fn payload(capability: &impl Capability, command: &str, args: Value) -> Value {
    match call(capability, command, args).await {
        Response::Done { payload, .. } => payload,
        Response::Failed(error) => panic!("{command}: {error}"),
    }
}

/// Whether a file is a WAV file with sound in it that is not silence.
fn is_sound(path: &Path) -> bool {
    let bytes = std::fs::read(path).unwrap();
    bytes.starts_with(b"RIFF") && bytes[44..].chunks(2).filter(|sample| sample[1].wrapping_add(1) > 1).count() > 1000
}

#[tokio::test]
async fn what_is_spoken_is_heard_and_kept() {
    let sound = Sound::start("spoken").await;
    let kept = sound.folder.join("kept");
    let options = tts::Options {
        output_dir: Some(kept.clone()),
        pulse_server: Some(sound.server.clone()),
        ..tts::Options::default()
    };
    let tts = Tts::new(options);
    assert!(tts.is_available("tts.speak"), "espeak-ng is missing; install the package espeak-ng");
    let (mut spoken, took) = timed(payload(&tts, "tts.speak", json!({ "text": " hello world\n" }))).await;
    let path = PathBuf::from(spoken["path"].take().as_str().unwrap());
    let length = spoken["durationMs"].take().as_u64().unwrap();
    assert_eq!(path.parent(), Some(&*kept));
    assert!(is_sound(&path) && (300..5000).contains(&length) && took >= Duration::from_millis(length), "{length}");
    let expected = json!({ "spoken": true, "provider": "espeak", "requestedProvider": "piper", "fellBack": true,
        "contentType": "audio/wav", "durationMs": null, "path": null });
    assert_eq!(spoken, expected);
    // A text cannot be a flag, and a longer one takes longer.
    let args =
        json!({ "text": "--help is what I say, and more than that", "provider": "Espeak", "voiceId": "en-us+f3" });
    let spoken = payload(&tts, "tts.speak", args).await;
    assert_eq!((&spoken["requestedProvider"], &spoken["fellBack"]), (&json!("espeak"), &json!(false)));
    assert!(spoken["durationMs"].as_u64().unwrap() > length, "{spoken}");
}

#[tokio::test]
async fn whatever_nobody_can_hear_is_not_called_spoken() {
    let nowhere = || Some("unix:/no/such/server".to_owned());
    let kept = folder("unheard");
    let tts =
        Tts::new(tts::Options { pulse_server: nowhere(), output_dir: Some(kept.clone()), ..tts::Options::default() });
    let unheard = payload(&tts, "tts.speak", json!({ "text": "hello" })).await;
    assert_eq!(unheard["spoken"], false);
    assert!(is_sound(Path::new(unheard["path"].as_str().unwrap())));
    std::fs::remove_dir_all(kept).unwrap();
    // A sound server without a device.
    let dummy = Sound::start_with("dummy", "auto_null").await;
    let unheard = payload(&dummy.tts(), "tts.speak", json!({ "text": "hello" })).await;
    assert_eq!((&unheard["spoken"], unheard.get("path")), (&json!(false), None));
}

#[tokio::test]
async fn texts_and_voices_are_checked_and_failures_say_nothing_of_them() {
    let sound = Sound::start("checked").await;
    let tts = sound.tts();
    let words = |count| "é".repeat(count);
    for (args, error) in [
        (json!({}), "Missing required text"),
        (json!({ "text": " \n" }), "Missing required text"),
        (json!({ "text": 5 }), "Missing required text"),
        (json!({ "text": words(5001) }), "TTS text exceeds 5000 characters."),
        (json!({ "text": "x", "voiceId": "--help" }), "Invalid voiceId"),
        (json!({ "text": "x", "voiceId": "../../etc/passwd" }), "Invalid voiceId"),
        (json!({ "text": "x", "model": "-x" }), "Invalid model"),
        (json!({ "text": "x", "provider": "espeak", "voiceId": "no such voice" }), "Speak failed"),
        (json!({ "text": "x", "provider": "elevenlabs" }), "Speak failed"),
        (json!({ "text": "x", "provider": "piper" }), "Speak failed"),
        (json!({ "text": "x", "provider": "windows" }), "Speak failed"),
    ] {
        assert_eq!(call(&tts, "tts.speak", args.clone()).await, Response::failed(error), "{args}");
    }
    let status = payload(&tts, "tts.status", json!({})).await;
    let named = |name: &str| status[name].clone();
    assert_eq!((named("configuredProvider"), named("effectiveProvider")), (json!("piper"), json!("espeak")));
    assert_eq!(named("willFallBack"), true);
    assert_eq!(status["providers"][1], json!({ "provider": "espeak", "readiness": "ready", "isReady": true }));
    let elevenlabs = json!({ "provider": "elevenlabs", "readiness": "needs-api-key", "isReady": false });
    assert_eq!(status["providers"][2], elevenlabs);
}

#[tokio::test]
async fn one_speech_is_heard_at_a_time_until_it_is_interrupted_or_cancelled() {
    let sound = Sound::start("turns").await;
    let tts = sound.tts();
    let long = "one two three four five six seven eight nine ten ".repeat(20);
    let cancel = CancellationToken::new();
    let is_playing = async || sound.players() == 1;
    let speak = |text: &str, interrupts: bool| {
        let args = json!({ "text": text, "interrupt": interrupts });
        tts.execute(request("tts.speak", args), cancel.clone())
    };
    let canceled = Response::failed("Speak canceled");
    let (first, waiting, last) = soon(async {
        tokio::join!(
            speak(&long, false),
            async {
                until(is_playing).await;
                speak(&long, false).await
            },
            async {
                until(is_playing).await;
                // The other one waits for its turn.
                tokio::time::sleep(Duration::from_millis(300)).await;
                assert_eq!(sound.players(), 1);
                speak("stop", true).await
            }
        )
    })
    .await;
    assert_eq!((&first, &waiting), (&canceled, &canceled));
    assert!(matches!(last, Response::Done { .. }), "{last:?}");
    let (cancelled, ()) = soon(async {
        tokio::join!(speak(&long, false), async {
            until(is_playing).await;
            cancel.cancel();
        })
    })
    .await;
    assert_eq!(cancelled, canceled);
    let (_, took) = timed(until(async || sound.players() == 0)).await;
    assert!(took < Duration::from_secs(2), "{took:?}");
}

/// A word and a voice that PocketSphinx understands.
const CITY: &str = "washington washington";

async fn say_city(sound: &Sound) {
    let args = json!({ "text": CITY, "provider": "espeak", "voiceId": "en-us+f3" });
    assert_eq!(payload(&sound.tts(), "tts.speak", args).await["spoken"], true);
}

#[tokio::test]
async fn what_is_said_is_understood_when_it_has_ended() {
    let sound = Sound::start("listen").await;
    let stt = sound.stt();
    let (mut heard, ()) = tokio::join!(payload(&stt, "stt.listen", json!({ "timeoutMs": 60_000 })), async {
        until(async || sound.is_recorded()).await;
        say_city(&sound).await;
    });
    assert!(heard["text"].as_str().unwrap().contains("washington"), "{heard}");
    let duration = heard["durationMs"].as_u64().unwrap();
    assert!((1500..20_000).contains(&duration), "{heard}");
    let segment = heard["segments"].take()[0].take();
    assert_eq!(segment["text"], heard["text"]);
    let (start, end) = (segment["startMs"].as_u64().unwrap(), segment["endMs"].as_u64().unwrap());
    assert!(start + 500 < end && end <= duration, "{segment}");
    assert_eq!((&heard["language"], &heard["engineEffective"]), (&json!("en-US"), &json!("pocketsphinx")));
}

#[tokio::test]
async fn a_recording_of_a_fixed_time_is_transcribed() {
    let sound = Sound::start("transcribe").await;
    let stt = sound.stt();
    let args = json!({ "maxDurationMs": 5000, "language": "en" });
    let (heard, ()) = tokio::join!(payload(&stt, "stt.transcribe", args), async {
        until(async || sound.is_recorded()).await;
        say_city(&sound).await;
    });
    assert!(heard["text"].as_str().unwrap().contains("washington"), "{heard}");
    assert_eq!((&heard["transcribed"], &heard["durationMs"]), (&json!(true), &json!(5000)));
    assert_eq!((&heard["language"], &heard["engineEffective"]), (&json!("en"), &json!("pocketsphinx")));
    let silence = payload(&stt, "stt.transcribe", json!({ "maxDurationMs": 300 })).await;
    let expected = json!({ "transcribed": false, "text": "", "durationMs": 300, "language": "auto",
        "engineEffective": "pocketsphinx" });
    assert_eq!(silence, expected);
    let silence = payload(&stt, "stt.listen", json!({ "timeoutMs": 1 })).await;
    let expected = json!({ "text": "", "language": "auto", "durationMs": 1000, "segments": [],
        "engineEffective": "pocketsphinx" });
    assert_eq!(silence, expected);
}

#[tokio::test]
async fn whoever_cannot_listen_says_so() {
    let sound = Sound::start("deaf").await;
    let stt = sound.stt();
    for (command, args, error) in [
        ("stt.transcribe", json!({}), "Missing required maxDurationMs"),
        ("stt.transcribe", json!({ "maxDurationMs": 0 }), "Missing required maxDurationMs"),
        ("stt.transcribe", json!({ "maxDurationMs": 1.5 }), "Missing required maxDurationMs"),
        ("stt.transcribe", json!({ "maxDurationMs": 30_001 }), "maxDurationMs exceeds 30000 ms"),
        ("stt.transcribe", json!({ "maxDurationMs": 5, "language": "canary-$(x)" }), "Invalid language tag"),
        ("stt.listen", json!({ "language": "canary" }), "Invalid language tag"),
        ("stt.listen", json!({ "language": "de" }), "Language not supported by pocketsphinx"),
    ] {
        assert_eq!(call(&stt, command, args.clone()).await, Response::failed(error), "{command} {args}");
    }
    let nowhere = || Some("unix:/no/such/server".to_owned());
    let deaf = Stt::new(stt::Options { pulse_server: nowhere(), ..stt::Options::default() });
    let failed = call(&deaf, "stt.transcribe", json!({ "maxDurationMs": 100 })).await;
    assert_eq!(failed, Response::failed("Transcribe failed"));
    assert_eq!(call(&deaf, "stt.listen", json!({})).await, Response::failed("Listen failed"));

    let ready = json!({ "engine": "pocketsphinx", "readiness": "ready", "modelDownloadProgress": null,
        "isListenWithVadSupported": true, "isBoundedTranscribeSupported": true });
    assert_eq!(payload(&stt, "stt.status", json!({})).await, ready);
    let without_model = stt::Options { pocketsphinx_model: Some("/no/such/model".into()), ..stt::Options::default() };
    let unready = Stt::new(without_model);
    assert!(!unready.is_available("stt.listen") && unready.is_available("stt.status"));
    assert_eq!(payload(&unready, "stt.status", json!({})).await["readiness"], "model-not-downloaded");
    assert_eq!(call(&unready, "stt.listen", json!({})).await, Response::failed("STT listen not available"));
    let transcribe = call(&unready, "stt.transcribe", json!({ "maxDurationMs": 5 })).await;
    assert_eq!(transcribe, Response::failed("STT transcribe not available"));
}

#[tokio::test]
async fn one_listens_at_a_time_and_stops_when_it_is_cancelled() {
    let sound = Sound::start("cancel").await;
    let stt = sound.stt();
    let cancel = CancellationToken::new();
    for (command, args, text) in [
        ("stt.listen", json!({}), "Listen canceled"),
        ("stt.transcribe", json!({ "maxDurationMs": 30_000 }), "Transcribe canceled"),
    ] {
        let cancel = cancel.child_token();
        let (cancelled, ()) = soon(async {
            tokio::join!(stt.execute(request(command, args), cancel.clone()), async {
                until(async || sound.is_recorded()).await;
                assert_eq!(call(&stt, "stt.listen", json!({})).await, Response::failed("The microphone is in use"));
                cancel.cancel();
            })
        })
        .await;
        assert_eq!(cancelled, Response::failed(text));
        let (_, took) = timed(until(async || !sound.is_recorded())).await;
        assert!(took < Duration::from_secs(2), "{took:?}");
    }
}
