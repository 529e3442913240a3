// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package nodeconfig

import (
	"bytes"
	"context"
	"encoding/json"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cilium/hive/cell"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/rest"

	"github.com/cilium/networkdriver/api/v2alpha1"
)

const testTimeout = 30 * time.Second

// script is an API server of which the test answers each request by hand.
type script struct {
	requests chan request
}

// request is a list or a watch that waits for its answer.
type request struct {
	query  map[string][]string
	answer func(status int, body any)
	stream chan metav1.WatchEvent // what to send on a watch; closing it ends the watch
}

func (s *script) ServeHTTP(response http.ResponseWriter, r *http.Request) {
	answered := make(chan struct{})
	next := request{query: r.URL.Query()}
	next.answer = func(status int, body any) {
		response.Header().Set("Content-Type", "application/json")
		response.WriteHeader(status)
		_ = json.NewEncoder(response).Encode(body)
		close(answered)
	}
	watching := r.URL.Query().Has("watch")
	if watching {
		next.stream = make(chan metav1.WatchEvent)
	}
	select {
	case s.requests <- next:
	case <-r.Context().Done():
		return
	}
	if !watching {
		<-answered
		return
	}
	response.Header().Set("Content-Type", "application/json")
	response.WriteHeader(http.StatusOK)
	response.(http.Flusher).Flush()
	for {
		select {
		case event, open := <-next.stream:
			if !open {
				return
			}
			_ = json.NewEncoder(response).Encode(event)
			response.(http.Flusher).Flush()
		case <-r.Context().Done():
			return
		}
	}
}

func (s *script) next(t *testing.T) request {
	t.Helper()
	select {
	case r := <-s.requests:
		require.Equal(t, []string{"metadata.name=worker"}, r.query["fieldSelector"])
		return r
	case <-time.After(testTimeout):
		t.Fatal("the watcher asks for nothing")
		return request{}
	}
}

func (s *script) list(t *testing.T, items ...v2alpha1.CiliumNetworkDriverNodeConfig) {
	t.Helper()
	r := s.next(t)
	require.Nil(t, r.stream, "wanted a list")
	assert.NotEqual(t, []string{"0"}, r.query["resourceVersion"], "whatever the API server's cache has")
	r.answer(http.StatusOK, listOf(items))
}

func listOf(items []v2alpha1.CiliumNetworkDriverNodeConfig) v2alpha1.CiliumNetworkDriverNodeConfigList {
	return v2alpha1.CiliumNetworkDriverNodeConfigList{
		TypeMeta: metav1.TypeMeta{APIVersion: v2alpha1.SchemeGroupVersion.String(), Kind: v2alpha1.NodeConfigKind + "List"},
		ListMeta: metav1.ListMeta{ResourceVersion: "7"},
		Items:    items,
	}
}

func (s *script) watch(t *testing.T) chan<- metav1.WatchEvent {
	t.Helper()
	r := s.next(t)
	require.NotNil(t, r.stream, "wanted a watch")
	require.Equal(t, []string{"7"}, r.query["resourceVersion"])
	return r.stream
}

// watchAgain answers what follows the end of a watch: a list first if the watch was short.
func (s *script) watchAgain(t *testing.T, items ...v2alpha1.CiliumNetworkDriverNodeConfig) chan<- metav1.WatchEvent {
	t.Helper()
	r := s.next(t)
	if r.stream != nil {
		return r.stream
	}
	r.answer(http.StatusOK, listOf(items))
	return s.watch(t)
}

func (s *script) refuse(t *testing.T, status int, reason metav1.StatusReason) {
	t.Helper()
	s.next(t).answer(status, failure(status, reason))
}

func failure(status int, reason metav1.StatusReason) metav1.Status {
	return metav1.Status{
		TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Status"},
		Status:   metav1.StatusFailure, Code: int32(status), Reason: reason,
	}
}

func change(t *testing.T, eventType string, object any) metav1.WatchEvent {
	t.Helper()
	event := metav1.WatchEvent{Type: eventType}
	raw, err := json.Marshal(object)
	require.NoError(t, err)
	event.Object.Raw = raw
	return event
}

func object(uid types.UID, generation int64, resourceVersion string) v2alpha1.CiliumNetworkDriverNodeConfig {
	return v2alpha1.CiliumNetworkDriverNodeConfig{
		TypeMeta:   metav1.TypeMeta{APIVersion: v2alpha1.SchemeGroupVersion.String(), Kind: v2alpha1.NodeConfigKind},
		ObjectMeta: metav1.ObjectMeta{Name: "worker", UID: uid, Generation: generation, ResourceVersion: resourceVersion},
	}
}

// syncBuffer is a buffer for logs.
type syncBuffer struct {
	mu  sync.Mutex // guards buf
	buf bytes.Buffer
}

func (b *syncBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.Write(p)
}

func (b *syncBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.String()
}

func startWatcher(t *testing.T) (*script, *Watcher, *syncBuffer) {
	t.Helper()
	server := &script{requests: make(chan request)}
	web := httptest.NewServer(server)
	client, err := NewClient(&rest.Config{Host: web.URL})
	require.NoError(t, err)
	logs := &syncBuffer{}
	watcher := NewWatcher(slog.New(slog.NewTextHandler(logs, nil)), client, "worker")
	watcher.follower.Backoff = wait.Backoff{Duration: time.Millisecond, Steps: 1}

	ctx, cancel := context.WithCancel(t.Context())
	health, _ := cell.NewSimpleHealth()
	done := make(chan error)
	go func() { done <- watcher.Run(ctx, health) }()
	t.Cleanup(func() {
		cancel()
		require.NoError(t, <-done)
		web.Close()
	})
	return server, watcher, logs
}

func nextEvent(t *testing.T, watcher *Watcher) Event {
	t.Helper()
	select {
	case event := <-watcher.Events():
		return event
	case <-time.After(testTimeout):
		t.Fatal("no event")
		return Event{}
	}
}

func requireNoEvent(t *testing.T, watcher *Watcher) {
	t.Helper()
	select {
	case event := <-watcher.Events():
		t.Fatalf("event nobody asked for: %+v", event.Config)
	default:
	}
}

func TestWatcherFollowsChanges(t *testing.T) {
	server, watcher, _ := startWatcher(t)

	server.list(t)
	stream := server.watch(t)
	require.Nil(t, nextEvent(t, watcher).Config, "no config is an event too")

	stream <- change(t, "ADDED", object("a", 1, "8"))
	event := nextEvent(t, watcher)
	require.Equal(t, types.UID("a"), event.Config.UID)

	stream <- change(t, "MODIFIED", object("a", 1, "9")) // a write of the status
	stream <- change(t, "MODIFIED", object("a", 2, "10"))
	event = nextEvent(t, watcher)
	require.EqualValues(t, 2, event.Config.Generation)

	stream <- change(t, "DELETED", object("a", 2, "11"))
	require.Nil(t, nextEvent(t, watcher).Config)
	stream <- change(t, "ADDED", object("b", 1, "12"))
	require.Equal(t, types.UID("b"), nextEvent(t, watcher).Config.UID)
}

func TestWatcherComesBack(t *testing.T) {
	server, watcher, logs := startWatcher(t)

	server.list(t, object("a", 1, "7"))
	stream := server.watch(t)
	require.NotNil(t, nextEvent(t, watcher).Config)

	close(stream) // the server ends the watch
	stream = server.watchAgain(t, object("a", 1, "7"))
	requireNoEvent(t, watcher) // nothing has changed

	stream <- change(t, "ERROR", failure(http.StatusGone, metav1.StatusReasonExpired))
	server.list(t, object("a", 2, "9"))
	server.watch(t)
	require.EqualValues(t, 2, nextEvent(t, watcher).Config.Generation, "missed between two watches")
	require.Empty(t, logs.String(), "none of this is worth a log")
}

func TestWatcherWaitsForDefinition(t *testing.T) {
	server, watcher, logs := startWatcher(t)

	for range 5 {
		server.refuse(t, http.StatusNotFound, metav1.StatusReasonNotFound)
	}
	requireNoEvent(t, watcher)
	server.list(t, object("a", 1, "7"))
	stream := server.watch(t)
	require.NotNil(t, nextEvent(t, watcher).Config)
	require.Equal(t, 1, strings.Count(logs.String(), "level=WARN"), logs.String())
	require.Contains(t, logs.String(), "ciliumnetworkdrivernodeconfigs.cilium.io")

	// An API server that does not answer, or does not know the resource yet
	// after a restart, does not take the configuration away.
	stream <- change(t, "ERROR", failure(http.StatusGone, metav1.StatusReasonExpired))
	server.refuse(t, http.StatusNotFound, metav1.StatusReasonNotFound)
	server.refuse(t, http.StatusForbidden, metav1.StatusReasonForbidden)
	server.list(t, object("a", 1, "7"))
	server.watch(t)
	requireNoEvent(t, watcher)
}

func TestWatcherKeepsTheNewest(t *testing.T) {
	server, watcher, _ := startWatcher(t)
	server.list(t, object("a", 1, "7"))
	stream := server.watch(t)
	for generation := range int64(50) {
		stream <- change(t, "MODIFIED", object("a", generation+2, "8"))
	}
	require.Eventually(t, func() bool {
		event := nextEvent(t, watcher)
		return event.Config.Generation == 51
	}, testTimeout, time.Millisecond)
}
