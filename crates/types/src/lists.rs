//! Lists whose memory is used again.

/// A list without its elements, for others that differ in lifetimes only: what was allocated for it
/// stays.
pub fn emptied<A, B>(mut list: Vec<A>) -> Vec<B> {
    const { assert!(size_of::<A>() == size_of::<B>() && align_of::<A>() == align_of::<B>()) };
    list.clear();
    // Mapping none of them is done in place.
    list.into_iter().map(|_| unreachable!("it is empty")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_outlives_what_it_held() {
        let memory: Vec<&'static str> = Vec::with_capacity(100);
        let at = memory.as_ptr().addr();
        let text = String::from("short-lived");
        let mut list: Vec<&str> = memory;
        list.push(&text);
        let memory: Vec<&'static str> = emptied(list);
        drop(text);
        assert_eq!((memory.len(), memory.capacity(), memory.as_ptr().addr()), (0, 100, at));
    }
}
