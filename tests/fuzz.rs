//! What must hold for whatever a peer sends, held against the fuzzers' corpus and damaged copies of it. The fuzzers
//! themselves, which learn from what the program does with their input, find more: `tests/fuzz.sh`.

use std::panic::catch_unwind;
use std::path::Path;

/// The properties, which the fuzzers share.
#[path = "../fuzz/src/lib.rs"]
mod properties;

/// How many damaged copies are made for each property.
const COPIES: usize = 3000;

/// What matters to parsers.
const BYTES: &[u8] = b"{}[],:\"\\0123456789eE+-.truefalsn \n\x00\x7f\xc3\xff";

/// Random numbers that are the same in every run: xorshift64*, by Vigna.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        let number = self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33;
        usize::try_from(number).unwrap() % limit.max(1)
    }

    /// A piece of `text`, of up to `most` bytes.
    fn piece<'a>(&mut self, text: &'a [u8], most: usize) -> &'a [u8] {
        let start = self.below(text.len());
        let end = (start + self.below(most) + 1).min(text.len());
        &text[start..end]
    }

    /// A copy with some bytes changed, taken out, doubled, or replaced by a piece of another text.
    fn damage(&mut self, text: &[u8], other: &[u8]) -> Vec<u8> {
        let mut text = text.to_vec();
        for _ in 0..=self.below(4) {
            let at = self.below(text.len() + 1);
            let end = (at + self.below(8)).min(text.len());
            let with = match self.below(5) {
                0 => Vec::new(),
                1 => vec![BYTES[self.below(BYTES.len())]],
                2 => text[at..end].repeat(2),
                3 => self.piece(other, 32).to_vec(),
                _ => self.piece(&text.clone(), 32).to_vec(),
            };
            text.splice(at..end, with);
        }
        text
    }
}

fn holds_for_the_corpus(name: &str, check: fn(&[u8])) {
    let folder = Path::new("fuzz/corpus").join(name);
    let files: Vec<_> = std::fs::read_dir(&folder).unwrap().map(|file| file.unwrap().path()).collect();
    assert!(files.len() >= 5, "{} holds next to nothing", folder.display());
    let texts: Vec<_> = files.iter().map(|file| std::fs::read(file).unwrap()).collect();
    for (file, text) in files.iter().zip(&texts) {
        assert!(catch_unwind(|| check(text)).is_ok(), "{}", file.display());
    }
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    for _ in 0..COPIES {
        let (text, other) = (&texts[random.below(texts.len())], &texts[random.below(texts.len())]);
        let text = random.damage(text, other);
        assert!(catch_unwind(|| check(&text)).is_ok(), "{name}: {:?}", String::from_utf8_lossy(&text));
    }
}

#[test]
fn what_a_client_sends_is_read_as_others_read_it_and_answered_once() {
    holds_for_the_corpus("envelope", properties::envelope::check);
}

#[test]
fn whatever_an_app_answers_ends_its_own_call_alone_and_reaches_the_client_well_formed() {
    holds_for_the_corpus("bridge_frame", properties::bridge_frame::check);
}

#[test]
fn what_an_app_registers_is_listed_as_it_was_sent_or_refused_in_a_sentence() {
    holds_for_the_corpus("registration", properties::registration::check);
}

#[test]
fn no_header_talks_its_way_past_the_gate() {
    holds_for_the_corpus("headers", properties::headers::check);
}

#[test]
fn ids_are_the_same_if_their_values_are() {
    holds_for_the_corpus("node_id", properties::node_id::check);
}

#[test]
fn whatever_a_proxy_sends_the_node_runs_a_call_once_and_answers_it() {
    holds_for_the_corpus("node_frame", properties::node_frame::check);
}

#[test]
fn a_file_of_tenants_opens_what_it_says_or_is_refused_without_being_quoted() {
    holds_for_the_corpus("tenants", properties::tenants::check);
}
