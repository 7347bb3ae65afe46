/* Worlds that change (docs/elastic.md): three ranks on two nodes, two steps in flight, one process
 * that is lost, or leaves, and one that joins in its seat. tests/package/test_models.py runs it.
 *
 * Seats 0 and 1 are one node; seat 2 stands for both ranks of the other node, whose steps it makes
 * together. So seats 0 and 1 are gateways of it, with a gather count of two, and it is theirs.
 * A process may stop at any place, or be slow for so long that others count it as lost, and go on:
 * it then acts like any other, in the memory that it has.
 *
 * A word holds 1 + the call it was written in: of a wait "at least", as in the code, then of the
 * check "exactly". Words within a node are stored; between nodes a write is under way until the
 * network, in any order, stores its payload and counts its immediate. Calls 0 to N1 - 1 are made in
 * epoch 1, calls from N1 on in the epoch that follows: 2, or 3 if 2 is refused.
 *
 * -DBROKEN=n breaks a rule (below); spin then finds a trail. 0: nothing is broken.
 */
#ifndef BROKEN
#define BROKEN 0
#endif
#define OLD_MEMORY 1      /* (E1) */
#define OLD_NUMBER 2      /* (E1) */
#define ZERO_LATE 3       /* (E2) */
#define SEATS 4           /* (E3) */
#define STAGED_FIRST 5    /* (E4) */
#define OWN_DECISION 6    /* (E5) */
#define ENTERS_EARLY 7    /* (E6) */
#define STOPS_SERVING 8   /* (E7) */
#define STAYS 9           /* (E8) */
#define UNCALLED 10       /* (E9) */
#define NO_WAIT 11        /* (R1), that the model sees the proof of protocol.md too */

#ifndef N1
#define N1 3              /* one slot of epoch 1 is used twice */
#endif
#ifndef N2
#define N2 1
#endif
#ifndef VICTIM
#define VICTIM 2          /* or 0: seat 1 is like it */
#endif
#define S 2
#define EPOCHS 4          /* 1 to 3 */
#define NEWCOMER 3        /* processes 0 to 2 are of the seats 0 to 2 */

/* Words, of one epoch each: m() is the epoch whose memory holds them. */
#define m(k) (BROKEN == OLD_MEMORY && (k) > 1 -> 1 : (k))
#define at(k, n, i, slot) (((k) * (n) + (i)) * S + (slot))
byte inbox[EPOCHS * 2 * S];    /* of seats 0 and 1, from the other one */
byte partial[EPOCHS * 2 * S];
byte gathered[EPOCHS * 2 * S]; /* at gateways 0 and 1 */
/* Links: dispatch 0 to 2, 1 to 2, 2 to 0, 2 to 1; then combine likewise. */
byte flies[EPOCHS * 8 * S];    /* a write under way */
byte payload[EPOCHS * 8 * S];
byte counted[EPOCHS * 8 * S];  /* immediates */

byte victim;                   /* seat that changes hands */
bool lost;                     /* it is counted as lost; else it leaves at the change */
byte called;                   /* the last epoch that was called */
byte decided[EPOCHS];          /* 0, YES, NO */
#define YES 1
#define NO 2
byte staged[EPOCHS];           /* bits of seats */
byte connected[4];             /* by process: the last epoch that it has connected in */
byte closed;                   /* bits of processes that serve epoch 1 no more */
byte finished;                 /* bits of processes */

#define bit(i) (1 << (i))
#define process_of(k, seat) ((k) > 1 && (seat) == victim -> NEWCOMER : (seat))
#define all_staged(k) (staged[k] == 7)
#define target(link) ((link) % 4 < 2 -> 2 : (link) % 4 - 2)
#define source(link) ((link) % 4 < 2 -> (link) % 4 : 2)

inline send(k, link, slot, word) {
  if
  :: BROKEN == STOPS_SERVING && k == 1 && (closed & bit(process_of(k, source(link)))) -> skip
  :: else ->
     assert(flies[at(k, 8, link, slot)] == 0 || BROKEN == SEATS);  /* one use of a slot at a time */
     flies[at(k, 8, link, slot)] = word
  fi
}

/* The network and the target's proxy: one write, in any order. */
#define fly(k, link, slot) \
  :: atomic { flies[at(k, 8, link, slot)] != 0 -> deliver(k, link, slot) }
#define fly_link(k, link) fly(k, link, 0) fly(k, link, 1)
#define fly_epoch(k) \
  fly_link(k, 0) fly_link(k, 1) fly_link(k, 2) fly_link(k, 3) \
  fly_link(k, 4) fly_link(k, 5) fly_link(k, 6) fly_link(k, 7)

inline deliver(k, link, slot) {
  to = process_of(k, target(link));
  into = k;
  if
  :: BROKEN == OLD_NUMBER && connected[to] > k -> into = connected[to]
  :: else -> skip
  fi;
  payload[at(m(k), 8, link, slot)] = flies[at(k, 8, link, slot)];
  flies[at(k, 8, link, slot)] = 0;
  if
  :: connected[to] >= into && !(BROKEN == STOPS_SERVING && k == 1 && (closed & bit(to))) ->
     counted[at(into, 8, link, slot)]++
  :: else -> skip  /* of no communicator that is here: discarded */
  fi;
  to = 0;
  into = 0
}
proctype Network() {
  byte to, into;
end:
  do
  fly_epoch(1)
  fly_epoch(2)
  fly_epoch(3)
  od
}

/* Arrived, with step e in slot e mod S, of call c. */
#define here(words, k, i, e, c) (words[at(m(k), 2, i, (e) % S)] >= (c) + 1)
#define came(k, link, e) (counted[at(k, 8, link, (e) % S)] >= (e) / S + 1)
#define is_right(words, n, k, i, e, c) (words[at(m(k), n, i, (e) % S)] == (c) + 1)

/* What a seat waits for in dispatch and in combine. */
#define dispatched(k, seat, e, c) \
  (seat < 2 -> here(inbox, k, seat, e, c) && came(k, 2, e) && came(k, 3, e) \
            : came(k, 0, e) && came(k, 1, e))
#define combined(k, seat, e, c) \
  (seat < 2 -> here(partial, k, seat, e, c) && came(k, 6 + seat, e) : came(k, 4, e) && came(k, 5, e))

inline check_dispatch(k, seat, e, c) {
  if
  :: seat < 2 -> assert(is_right(inbox, 2, k, seat, e, c));
                 assert(is_right(payload, 8, k, 2, e, c));
                 assert(is_right(payload, 8, k, 3, e, c))
  :: else -> assert(is_right(payload, 8, k, 0, e, c)); assert(is_right(payload, 8, k, 1, e, c))
  fi
}
inline check_combine(k, seat, e, c) {
  if
  :: seat < 2 -> assert(is_right(partial, 2, k, seat, e, c));
                 assert(is_right(payload, 8, k, 6 + seat, e, c))
  :: else -> assert(is_right(payload, 8, k, 4, e, c)); assert(is_right(payload, 8, k, 5, e, c))
  fi
}
inline hand_in(k, gateway, e, c) {
  gathered[at(m(k), 2, gateway, e % S)]++;
  if
  :: gathered[at(m(k), 2, gateway, e % S)] == 2 * (e / S + 1) -> send(k, 4 + gateway, e % S, c + 1)
  :: else -> skip
  fi
}

/* Whoever sees that all are staged. */
inline decide(k) {
  if
  :: (all_staged(k) || BROKEN == OWN_DECISION) && decided[k] == 0 -> decided[k] = YES
  :: else -> skip
  fi
}

/* Beside the steps: one epoch after the other that calls this process. One process after the other:
 * before the decision nothing else looks at what they do. */
proctype Stage(byte me; byte seat) {
  byte k = 2;
end:
  do
  :: atomic { k < EPOCHS && decided[k] == NO -> k++ }
  :: atomic {
       BROKEN != STAGED_FIRST && k < EPOCHS && called >= k && decided[k] == 0 && connected[me] < k &&
       (staged[k] & (bit(seat) - 1)) == bit(seat) - 1 ->
       connected[me] = k;
       staged[k] = staged[k] | bit(seat);
       decide(k)
     }
  :: atomic {
       BROKEN == STAGED_FIRST && called >= k && (staged[k] & bit(seat)) == 0 ->
       staged[k] = staged[k] | bit(seat);
       decide(k)
     }
  :: atomic {
       BROKEN == STAGED_FIRST && (staged[k] & bit(seat)) && connected[me] < k -> connected[me] = k
     }
  od
}

/* A deadline: epoch 2 may be refused, and the next one is called. */
#ifdef REFUSES
proctype Refuser() {
  if
  :: atomic { called == 2 && decided[2] == 0 -> decided[2] = NO; called = 3 }
  :: decided[2] == YES
  fi
}
#endif

#define may_give_up (lost && k == 1)
#define is_victim (me == victim)          /* NEWCOMER is not */
#define was_called (me != victim)
#define next_epoch (decided[2] == YES -> 2 : (decided[3] == YES -> 3 : 0))

#define may_send (half == 0 && c < last && (e < S || BROKEN == NO_WAIT || combined(k, seat, e - S, c - S)))
#define may_read (half == 1 && dispatched(k, seat, e, c))
#define may_end (half == 0 && c == last && combined(k, seat, e - 1, c - 1) && \
                 (e < 2 || combined(k, seat, e - 2, c - 2)))

proctype Rank(byte me; byte seat) {
  byte k = 1, c = 0, e = 0, last = N1, half = 0;
  if
  :: me == NEWCOMER -> goto change
  :: else -> skip
  fi;
steps:
  do
  :: atomic { may_send ->
       if
       :: e >= S && BROKEN != NO_WAIT -> check_combine(k, seat, e - S, c - S)
       :: else -> skip
       fi;
       if
       :: seat < 2 -> inbox[at(m(k), 2, 1 - seat, e % S)] = c + 1; send(k, seat, e % S, c + 1)
       :: else -> send(k, 2, e % S, c + 1); send(k, 3, e % S, c + 1)
       fi;
       half = 1 }
  :: atomic { may_read ->
       check_dispatch(k, seat, e, c);
       if
       :: seat < 2 -> partial[at(m(k), 2, 1 - seat, e % S)] = c + 1;
                      hand_in(k, 0, e, c); hand_in(k, 1, e, c)
       :: else -> send(k, 6, e % S, c + 1); send(k, 7, e % S, c + 1)
       fi;
       c++; e++; half = 0 }
  :: atomic { may_end ->
       check_combine(k, seat, e - 1, c - 1);
       if
       :: e >= 2 -> check_combine(k, seat, e - 2, c - 2)
       :: else -> skip
       fi;
       if
       :: k > 1 || c > N1 -> finished = finished | bit(me); goto left
       :: else -> goto change
       fi }
  :: atomic { BROKEN == ENTERS_EARLY && k == 1 && was_called && half == 0 && c < N1 &&
              next_epoch != 0 -> goto enter }
  :: atomic { is_victim && lost -> goto left }  /* for good */
  :: atomic { may_give_up && !may_send && !may_read && !may_end -> goto change }
  od;
change:
  atomic {
    if
    :: was_called && BROKEN == STAYS && me == (victim + 1) % 3 ->
       c = N1; last = N1 + N2; half = 0; goto steps
    :: was_called && next_epoch != 0 -> goto enter
    :: !was_called && BROKEN == SEATS && next_epoch != 0 -> connected[me] = next_epoch; goto enter
    :: !was_called && BROKEN == UNCALLED && c == N1 -> last = N1 + N2; goto steps
    :: !was_called && !(BROKEN == SEATS && lost) && !(BROKEN == UNCALLED && c == N1) -> goto left
    fi
  };
enter:
  atomic {
    k = next_epoch;
    if
    :: BROKEN == STOPS_SERVING && me != NEWCOMER ->
       closed = closed | bit(me);
       if
       :: me < 2 -> flies[at(1, 8, me, 0)] = 0; flies[at(1, 8, me, 1)] = 0;
                    flies[at(1, 8, 4 + me, 0)] = 0; flies[at(1, 8, 4 + me, 1)] = 0
       :: else -> skip
       fi
    :: BROKEN == ZERO_LATE && seat < 2 ->
       inbox[at(k, 2, seat, 0)] = 0; inbox[at(k, 2, seat, 1)] = 0;
       gathered[at(k, 2, seat, 0)] = 0; gathered[at(k, 2, seat, 1)] = 0
    :: else -> skip
    fi;
    if
    :: BROKEN == ENTERS_EARLY && c < N1 && me != NEWCOMER -> last = c + N2
    :: else -> c = N1; last = N1 + N2
    fi;
    e = 0; half = 0;
    goto steps
  };
left:
  /* (E9) Who is not called makes no call of those behind the change. */
  assert(!(is_victim && c > N1))
}

init {
  atomic {
    victim = VICTIM;
    called = 2;
    connected[0] = 1; connected[1] = 1; connected[2] = 1;
    run Network();
    run Rank(0, 0); run Rank(1, 1); run Rank(2, 2);
    run Rank(NEWCOMER, victim);
    if
    :: victim != 0 -> run Stage(0, 0)
    :: else -> skip
    fi;
    if
    :: victim != 1 -> run Stage(1, 1)
    :: else -> skip
    fi;
    if
    :: victim != 2 -> run Stage(2, 2)
    :: else -> skip
    fi;
    run Stage(NEWCOMER, victim);
#ifdef REFUSES
    run Refuser()
#endif
  }
  /* At any time, or never, others count the victim as lost. */
  if
  :: lost = true
  :: skip
  fi
}
